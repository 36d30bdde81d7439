"""Compare recipes in blocks: prompts, profile and contestants of a block are made on one machine,
and compared only with each other.

    python -m tests.bench.blocks run docs/results/blocks/gsm.yaml --work gsm [--blocks 0 1]
    python -m tests.bench.blocks tables docs/results/blocks/gsm.yaml
    python -m tests.bench.blocks archive docs/results/blocks/gsm.yaml --work gsm --blocks 0

A plan has `params` (a params.yaml), `problems` (the seed of block 0's problems, in the first
source; other blocks have the next seeds, so that each has its own training, validation and test
prompts), `blocks`, `reference` (a recipe), and `runs`: recipes with the passes of their plans or a
number of rollouts, in some blocks or all; those of the reference are in the order of their compute.
`extends` names a plan beside it, whose other values it takes. `run` brings the data root `--work`
up to date for each block and run, as `winnow run` does, and appends a line for every cell to the
results file beside the plan (.jsonl). It copies the cells' tables to `--work`-kept, because the
next run replaces them. A cell with a line is not run again, and an interrupted one resumes in the
same data root. CPUs of other models round differently, so the policy may differ between blocks;
differences within a block do not depend on that.

`tables` writes page and figure beside the plan (.md, .svg; block_page.py, block_figure.py).
`archive` writes the copied tables of a block beside the plan (-0.tar.xz), as data roots that
`winnow read` opens once they are unpacked at the top of the project. Training rollouts lose their
tokens and log-probabilities there."""

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flows.benchmark.results import append_result, read_results
from tasks.common import params
from tasks.common.checksums import read_checked
from tasks.common.files import replace_file
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.recipes import merged
from tasks.report.views.plots import THEMES
from tests.bench.block_figure import svg
from tests.bench.block_lines import ROOT, START, Run, archive, keep, lines_of
from tests.bench.block_page import Line, page


def read_plan(path: Path) -> tuple[dict[str, Any], list[Run]]:
    plan = plan_of(path)
    try:
        return plan, [Run(**run) for run in plan["runs"]]
    except (KeyError, TypeError) as error:
        raise SystemExit(f"{path}: `runs` is missing, or one has a wrong key: {error}") from None


def plan_of(path: Path, *later: Path) -> dict[str, Any]:
    """Return the values of a plan and of the plan that it extends. `later` extend this one."""
    try:
        plan = params.load(path)
    except ParamsError as error:
        raise SystemExit(str(error)) from None
    if path in later:
        raise SystemExit(f"{path} extends itself")
    base = plan.pop("extends", None)
    return merged(plan_of(path.with_name(base), path, *later), plan) if base else plan


def params_of(plan: Mapping[str, Any], block: int, run: Run) -> dict[str, Any]:
    """Return the params.yaml of a block's run."""
    values = yaml.safe_load(yaml.safe_dump(plan["params"]))
    budget = None if run.rollouts is None else {"account": "rollouts", "amount": run.rollouts}
    values["experiment"] = {"recipes": run.recipes, "seeds": [block], "budget": budget}
    values["ingest"]["sources"][0]["settings"]["seed"] = plan["problems"] + block
    values["allocate"] = {**values.get("allocate", {}), "passes": run.passes}
    return dict(values)


def run_blocks(path: Path, work: Path, blocks: Sequence[int], concurrency: int) -> None:
    """Run the cells of these blocks that have no line, and append their lines."""
    plan, runs = read_plan(path)
    results = path.with_suffix(".jsonl")
    if unknown := {*blocks} - {*plan["blocks"]}:
        raise SystemExit(f"{path} has no block {min(unknown)}; it has {plan['blocks']}")
    work.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        for run in runs:
            missing = [r for r in run.recipes if run.key(block, r) not in read_results(results)]
            if not missing or (run.blocks is not None and block not in run.blocks):
                continue
            run = replace(run, recipes=missing)
            content = yaml.safe_dump(params_of(plan, block, run)).encode()
            replace_file(work / "params.yaml", lambda file: file.write(content))  # noqa: B023
            command = [str(ROOT / ".venv/bin/python"), "-m", "flows", "run", "--data", str(work)]
            subprocess.run([*command, "--until", "policy"], check=True)
            card = read_checked(Layout(work).policy_card)
            check_policy(read_results(results).get(f"{block} {START}"), card["digest"])
            subprocess.run([*command, "--concurrency", str(concurrency)], check=True)
            keep(work, kept_folder(work) / f"{block} {run.length}", block, run)
            for line in lines_of(Layout(work), block, run):
                if line["key"] not in read_results(results):
                    append_result(results, line)


def kept_folder(work: Path) -> Path:
    return work.with_name(f"{work.name}-kept")


def check_policy(start: Line | None, digest: str) -> None:
    """Raise SystemExit if a block has lines of another initial policy than the one made here."""
    if start is not None and start["policy"] != digest:
        raise SystemExit(
            f"block {start['block']} has lines of the initial policy {start['policy']}, and this "
            f"machine made {digest}: finish the block with the data root it was begun in"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("command", choices=["run", "tables", "archive"])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--work", type=Path, default=Path("blocks"))
    parser.add_argument("--blocks", type=int, nargs="+", help="default: all of the plan")
    parser.add_argument("--concurrency", type=int, default=2, help="of `winnow run` (default: 2)")
    args = parser.parse_args()
    plan, runs = read_plan(args.plan)
    if args.command == "run":
        run_blocks(args.plan, args.work, args.blocks or plan["blocks"], args.concurrency)
    for block in args.blocks or plan["blocks"] if args.command == "archive" else ():
        archive(kept_folder(args.work), args.plan.with_suffix(""), block)
    lines = [*read_results(args.plan.with_suffix(".jsonl")).values()]
    text = page(plan, runs, lines).encode()
    replace_file(args.plan.with_suffix(".md"), lambda file: file.write(text))
    for name, theme in zip((".svg", "-dark.svg"), THEMES, strict=True):
        drawn = svg(plan, runs, lines, theme)
        path = args.plan.with_name(args.plan.stem + name)
        replace_file(path, lambda file: file.write(drawn))  # noqa: B023
    print(text.decode())


if __name__ == "__main__":
    main()
