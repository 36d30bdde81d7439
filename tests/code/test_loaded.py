"""What every stage really loads is in its digest, or is known to change nothing.

A wrong digest would give a stale result without a word, so the stages run here, on a tiny world,
and what they and their children load is written down (`hook/sitecustomize.py`)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.code.cells import cells
from tasks.code.left_out import POLICY, is_left_out
from tasks.common import params
from tasks.common.code import ROOT, module_file
from tests.train.worlds import PARAMS, make_world

HOOK = Path(__file__).with_name("hook")
RECIPE = {
    "allocate": {"strategy": "uniform", "group_size": 4},
    "train": {"select": {"method": "pods", "keep": 2}},
}
Loaded = Callable[..., set[str]]


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """The project's parameters, with little of everything."""
    real = params.load(ROOT / "params.yaml")
    source = real["ingest"]["sources"][0]
    training = {**real["policy"]["tiny"]["training"], "tokens": 2.0e4}
    return {
        **real,
        **{name: value for name, value in PARAMS.items() if name not in ("train", "recipes")},
        "experiment": {"recipes": ["r"], "seeds": [0]},
        "ingest": {
            **real["ingest"],
            "splits": {"train": 32, "validation": 8, "test": 8},
            "sources": [{**source, "settings": {**source["settings"], "num_prompts": 128}}],
        },
        "policy": {**real["policy"], "tiny": {**real["policy"]["tiny"], "training": training}},
        "profile": {"num_samples": 2},
        "train": {**real["train"], "max_steps": 2, "validation": PARAMS["train"]["validation"]},
        "recipes": {"r": RECIPE},
    }


@pytest.fixture(scope="module")
def loaded(
    values: dict[str, Any], guesser: Path, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    """Runs a stage and says which files of the project it loaded."""
    root = tmp_path_factory.mktemp("world")
    make_world(root / "data", guesser, [4] * 12)
    (root / "params.yaml").write_text(yaml.safe_dump(values))

    def run(stage: str, *coordinates: str, data: str = "data") -> set[str]:
        record = root / f"{stage}-{len(coordinates)}.loaded"
        command = [sys.executable, "-m", f"tasks.{stage}", *coordinates]
        places = ["--params", str(root / "params.yaml"), "--data", str(root / data)]
        done = subprocess.run(
            [*command, *places],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(HOOK), "WINNOW_LOADED": str(record)},
        )
        assert done.returncode == 0, done.stderr
        return set(files(record.read_text().splitlines()))

    return run


def files(lines: list[str]) -> set[str]:
    """The files behind module names and opened paths, from the root of the project."""
    paths = {
        Path(line) if "/" in line else module_file(line, ROOT)
        for line in lines
        if not line.endswith((".pyc", "__pycache__"))
    }
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path and path.is_file() and path.is_relative_to(ROOT / "tasks")
    }


@pytest.mark.slow
def test_every_stage_loads_only_what_is_in_its_digest(
    loaded: Loaded, values: dict[str, Any]
) -> None:
    found = {
        "ingest": loaded("ingest", data="other"),
        "profile": loaded("profile"),
        "baseline": loaded("evaluate"),
        "r/allocate": loaded("allocate", "--recipe", "r"),
        "r/train": loaded("train", "--recipe", "r", "--seed", "0"),
        "r/evaluate": loaded("evaluate", "--recipe", "r", "--seed", "0"),
        "report": loaded("report"),
    }
    digests = {name: cell.digests(ROOT)["files"] for name, cell in cells(values, ROOT).items()}
    missing = {
        name: sorted(path for path in paths - set(digests[name]) if not is_left_out(path))
        for name, paths in found.items()
    }
    assert not any(missing.values()), missing
    # the record works: methods that are loaded by name, the verifier in its own process, a page
    assert "tasks/train/methods/select/pods.py" in found["r/train"]
    assert "tasks/grading/verifiers/numeric.py" in found["r/train"]
    assert "tasks/report/page.html" in found["report"]


@pytest.mark.slow
def test_the_policy_loads_only_what_makes_it_or_is_known_not_to(
    loaded: Loaded, values: dict[str, Any]
) -> None:
    digest = cells(values, ROOT)["policy"].digests(ROOT)["files"]
    found = loaded("policy", data="made")
    known = tuple(POLICY)
    rest = {path for path in found - set(digest) if not path.startswith(known)}
    known = tuple(POLICY)
    rest = {path for path in found - set(digest) if not path.startswith(known)}
    missing = {path for path in rest if not is_left_out(path)}
    assert missing == set()
    assert "tasks/policy/families/chain_sum.py" in found
