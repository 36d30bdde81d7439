"""Compare recipes in blocks: prompts, profile and contestants of a block are made on one machine,
and compared only with each other.

    python -m tests.bench.blocks run docs/results/blocks/gsm.yaml --work gsm [--blocks 0 1]
    python -m tests.bench.blocks tables docs/results/blocks/gsm.yaml

A plan has `params` (a params.yaml), `problems` (the seed of block 0's problems, in the first
source; other blocks have the next seeds, so that each has its own training, validation and test
prompts), `blocks`, `reference` (a recipe), and `runs`: recipes with the passes of their plans or a
number of rollouts, those of the reference in the order of their compute. `run` brings the data root
`--work` up to date for each block and run, as `winnow run` does, and appends a line for every cell
to the results file beside the plan (.jsonl). It copies the cells' tables to `--work`-kept, because
the next run replaces them. A cell with a line is not run again, and an interrupted one resumes in
the same data root. CPUs of other models round differently, so the policy
may differ between blocks; differences within a block do not depend on that.

`tables` writes the page beside the plan (.md). A recipe's difference from another is its mean over
the blocks, with Student's interval; it includes seeds, prompts and policies. The ratio of compute
is that of the reference, at whose accuracy the recipe's equals it, over the recipe's: the
reference's accuracy is taken as linear in the logarithm of compute between its runs, and the
interval has every ratio at which the difference is not significant (Fieller)."""

import argparse
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from scipy.stats import t as student

from flows.benchmark.results import append_result, counts_of, read_results
from tasks.common.checksums import read_checked
from tasks.common.files import replace_file
from tasks.common.layout import Layout
from tests.bench.block_lines import ROOT, START, Run, keep, lines_of

Floats = npt.NDArray[np.float64]
Line = Mapping[str, Any]


def read_plan(path: Path) -> tuple[dict[str, Any], list[Run]]:
    plan = yaml.safe_load(path.read_text())
    return plan, [Run(**run) for run in plan["runs"]]


def params_of(plan: Mapping[str, Any], block: int, run: Run) -> dict[str, Any]:
    """Return the params.yaml of a block's run."""
    values = yaml.safe_load(yaml.safe_dump(plan["params"]))
    budget = None if run.rollouts is None else {"account": "rollouts", "amount": run.rollouts}
    values["experiment"] = {"recipes": run.recipes, "seeds": [block], "budget": budget}
    values["ingest"]["sources"][0]["settings"]["seed"] = plan["problems"] + block
    values["allocate"] = {**values.get("allocate", {}), "passes": run.passes}
    return dict(values)


def run_blocks(path: Path, work: Path, blocks: Sequence[int]) -> None:
    """Run the cells of these blocks that have no line, and append their lines."""
    plan, runs = read_plan(path)
    results = path.with_suffix(".jsonl")
    if unknown := {*blocks} - {*plan["blocks"]}:
        raise SystemExit(f"{path} has no block {min(unknown)}; it has {plan['blocks']}")
    work.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        for run in runs:
            missing = [r for r in run.recipes if run.key(block, r) not in read_results(results)]
            if not missing:
                continue
            run = replace(run, recipes=missing)
            params = yaml.safe_dump(params_of(plan, block, run)).encode()
            replace_file(work / "params.yaml", lambda file: file.write(params))  # noqa: B023
            command = [str(ROOT / ".venv/bin/python"), "-m", "flows", "run", "--data", str(work)]
            subprocess.run([*command, "--until", "policy"], check=True)
            card = read_checked(Layout(work).policy_card)
            check_policy(read_results(results).get(f"{block} {START}"), card["digest"])
            subprocess.run([*command, "--concurrency", "2"], check=True)
            for line in lines_of(Layout(work), block, run):
                if line["key"] not in read_results(results):
                    append_result(results, line)
            keep(work, work.with_name(f"{work.name}-kept") / f"{block} {run.length}", block, run)


def check_policy(start: Line | None, digest: str) -> None:
    """Raise SystemExit if a block has lines of another initial policy than the one made here."""
    if start is not None and start["policy"] != digest:
        raise SystemExit(
            f"block {start['block']} has lines of the initial policy {start['policy']}, and this "
            f"machine made {digest}: finish the block with the data root it was begun in"
        )


# --- the page


def accuracy(line: Line) -> float:
    return float(np.mean(counts_of(line["correct"]))) / int(line["trials"])


def compute(line: Line, account: str, runs_per_profile: int = 1) -> float:
    """Return a cell's compute, its profile divided among `runs_per_profile` runs."""
    if account == "rollouts":
        return float(line["rollouts"] + line["rollouts_profile"] / runs_per_profile)
    return float(line["flops"][account] + line["flops_profile"][account] / runs_per_profile)


def interval(values: Floats, level: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of independent values, and the ends of Student's interval; NaN for one."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, float("nan"), float("nan")
    half = float(student.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1))
    return mean, mean - half / len(values) ** 0.5, mean + half / len(values) ** 0.5


def detectable(deviation: float, num: int, power: float = 0.8, level: float = 0.95) -> float:
    """Return the difference that a test over `num` blocks finds with `power`; `deviation` is that
    of a block's difference. (An approximation by Student's quantiles, slightly too large.)"""
    quantiles = student.ppf((1 + level) / 2, num - 1) + student.ppf(power, num - 1)
    return float(quantiles * deviation / num**0.5)


def ratio(
    accuracy_B: Floats, compute_B: Floats, reference_BR: Floats, reference_compute_BR: Floats
) -> tuple[float | None, float, float]:
    """Return the reference's compute over the recipe's at equal accuracy, and the ends of its 95 %
    interval. `reference_BR` are the accuracies of the reference's R runs, by their compute. The
    middle is None if the accuracies never meet between the reference's runs; an end is the range's
    if nothing within the range is excluded there."""
    logs = np.log(reference_compute_BR.mean(0) / compute_B.mean())
    grid = np.linspace(logs[0], logs[-1], 2001)
    kept, means = list[bool](), list[float]()
    for place in grid:
        at_B = np.array([np.interp(place, logs, values) for values in reference_BR])
        mean, low, high = interval(accuracy_B - at_B)
        means.append(mean)
        kept.append(low <= 0.0 <= high)
    signs = np.sign(means)
    crossed = np.flatnonzero(signs[1:] != signs[:-1])
    middle = float(np.exp(grid[crossed[0]])) if len(crossed) else None
    inside = np.exp(grid[np.array(kept)])
    if not len(inside):
        return middle, float("nan"), float("nan")
    return middle, float(inside[0]), float(inside[-1])


Cells = Mapping[tuple[str, str], Mapping[int, Line]]
"""Lines by recipe and length of the run, and then by block."""


def by_cell(lines: Sequence[Line]) -> Cells:
    cells: dict[tuple[str, str], dict[int, Line]] = {}
    for line in lines:
        cells.setdefault((line["recipe"], line["length"]), {})[line["block"]] = line
    return cells


def points(values: tuple[float, float, float]) -> str:
    mean, low, high = (100 * value for value in values)
    return f"{mean:+.1f}" if np.isnan(low) else f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def page(plan: Mapping[str, Any], runs: Sequence[Run], lines: Sequence[Line]) -> str:
    """Return the page of a plan's results."""
    cells, reference = by_cell(lines), plan["reference"]
    lengths = [run.length for run in runs if reference in run.recipes]
    base, start = cells.get((reference, lengths[-1]), {}), cells.get((START, ""), {})
    rows = [
        "| recipe | length | blocks | test | over the start | "
        f"over `{reference}`, {lengths[-1]} | rollouts, profile | "
        "compute as the paper counts it | executed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (recipe, length), found in cells.items():
        blocks = sorted(found)
        mine = np.array([accuracy(found[block]) for block in blocks])
        row = [f"`{recipe}`", length, str(len(blocks)), f"{mine.mean():.1%}"]
        for others in (start, base):
            both = [block for block in blocks if block in others]
            own = np.array([accuracy(found[block]) - accuracy(others[block]) for block in both])
            row.append(points(interval(own)) if len(both) and others is not found else "")
        if recipe != START:
            mean = {
                name: np.mean([compute(line, name) for line in found.values()]) / 1e12
                for name in ("charged_paper", "executed")
            }
            row += [
                f"{np.mean([line['rollouts'] for line in found.values()]):,.0f}, "
                f"{np.mean([line['rollouts_profile'] for line in found.values()]):,.0f}",
                *(f"{mean[name]:,.0f} TFLOPs" for name in ("charged_paper", "executed")),
            ]
        rows.append("| " + " | ".join(row) + " |")
    rows += ["", *ratio_rows(reference, lengths, cells)]
    return f"# {plan['title']}\n\n" + "\n".join(rows) + "\n"


def ratio_rows(reference: str, lengths: Sequence[str], cells: Cells) -> Iterator[str]:
    """Yield the table of compute ratios, for the blocks that have all runs of the reference, which
    are in the order of their compute."""
    accounts = ("charged_paper", "executed", "charged_mixed", "rollouts")
    yield (
        f"| compute of `{reference}` / of the recipe, to the same accuracy | "
        + " | ".join(f"`{account}`" for account in accounts)
        + " |"
    )
    yield "|---|" + "---|" * len(accounts)
    ours = [cells.get((reference, length), {}) for length in lengths]
    for (recipe, length), found in cells.items():
        blocks = [b for b in sorted(found) if all(b in each for each in ours)]
        if recipe in (START, reference) or not blocks or len(lengths) < 2:
            continue
        theirs = np.array([[accuracy(each[b]) for each in ours] for b in blocks])
        mine = np.array([accuracy(found[b]) for b in blocks])
        row = []
        for account in accounts:
            costs = np.array([[compute(each[b], account) for each in ours] for b in blocks])
            own = np.array([compute(found[b], account) for b in blocks])
            middle, low, high = ratio(mine, own, theirs, costs)
            row.append(f"{'none' if middle is None else f'{middle:.2f}'} ({low:.2f} to {high:.2f})")
        yield f"| `{recipe}`, {length} | " + " | ".join(row) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("command", choices=["run", "tables"])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--work", type=Path, default=Path("blocks"))
    parser.add_argument("--blocks", type=int, nargs="+", help="default: all of the plan")
    args = parser.parse_args()
    plan, runs = read_plan(args.plan)
    if args.command == "run":
        run_blocks(args.plan, args.work, args.blocks or plan["blocks"])
    lines = [*read_results(args.plan.with_suffix(".jsonl")).values()]
    text = page(plan, runs, lines).encode()
    replace_file(args.plan.with_suffix(".md"), lambda file: file.write(text))
    print(text.decode())


if __name__ == "__main__":
    main()
