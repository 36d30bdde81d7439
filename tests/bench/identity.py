"""Check whether a code change changes a result: the digests of every recipe's plan and training.

    python -m tests.bench.identity --out before.json            # on the code before the change
    python -m tests.bench.identity --against before.json        # on the code after it

Every recipe of params.yaml is planned and trained for a few steps on the embedded policy, with one
seed, in a small world. The digests are of the files' bytes, without measured seconds. The status is
1 if a file of a recipe differs, or if a previous recipe is gone."""

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.benchmark.cells import run_stage
from tasks.common import params, recipes
from tasks.common.files import digest_file
from tasks.common.layout import Layout
from tests.bench.world import PROJECT

Digests = dict[str, dict[str, str]]


def parameters(steps: int, staleness: int) -> dict[str, Any]:
    """Return the values of params.yaml for a small world."""
    values = params.load(PROJECT / "params.yaml")
    for name in ("profile", "allocate", "engine", "store", "train"):
        values.setdefault(name, {})
    values["experiment"]["budget"] = None
    values["ingest"]["splits"] = {"train": 64, "validation": 8, "test": 8}
    values["profile"]["num_samples"] = 4
    values["allocate"]["passes"] = 1
    values["engine"] |= {"name": "hf", "device": "cpu"}
    values["store"]["location"] = None
    values["train"] |= {"max_steps": steps, "max_staleness": staleness}
    values["gates"] = {"min_solved_rate": 0.0, "max_truncated_rate": 1.0}
    itself = {"train": {"reference": {"source": str(PROJECT / "data" / "policy")}}}
    values["recipes"] = {**(values.get("recipes") or {}), "distil": itself}  # no teacher is here
    return values


def measure(root: Path, values: dict[str, Any], names: Sequence[str]) -> Digests:
    """Return the digest of every file of each recipe's plan and training in the data root."""
    layout = Layout(root)
    layout.root.mkdir(parents=True)
    shutil.copytree(PROJECT / "data" / "policy", layout.policy)
    shutil.copy(PROJECT / "data" / "policy.json", layout.policy_card)
    for name in ("ingest", "profile"):
        run_stage(name, values, layout)
    found = {"profile": digests_of(layout.profile)}
    for number, recipe in enumerate(names):
        print(f"{number + 1} of {len(names)}: {recipe}", file=sys.stderr)
        try:
            run_stage("allocate", values, layout, recipe, 0)
            run_stage("train", values, layout, recipe, 0)
        except params.ParamsError as error:
            print(f"  refused: {error}", file=sys.stderr)
            found[recipe] = {"refused": "yes"}
            continue
        found[recipe] = digests_of(layout.train(recipe, 0).parent)
    return found


def digests_of(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}


def differences(before: Digests, after: Digests) -> list[str]:
    """Return a line per recipe that is gone or has other files. New recipes are ignored."""
    lines = []
    for name, files in before.items():
        now: Mapping[str, str] = after.get(name, {})
        other = sorted(file for file in {*files, *now} if files.get(file) != now.get(file))
        if other:
            lines.append(f"{name}: {', '.join(other) if now else 'is gone'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--recipes", nargs="*", help="only these")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    values = parameters(options.steps, options.max_staleness)
    with tempfile.TemporaryDirectory() as folder:
        names = options.recipes or recipes.names(values)
        found = measure(Path(folder) / "data", values, names)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if options.against is None:
        print(f"{len(found)} recipes and stages")
        return
    lines = differences(json.loads(options.against.read_text()), found)
    print("\n".join(lines) or f"{len(found)} recipes and stages, no difference")
    if lines:
        sys.exit(1)


if __name__ == "__main__":
    main()
