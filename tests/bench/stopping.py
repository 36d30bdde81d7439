"""What a profile that stops early saves, and how often it changes the decision of `sgpo`.

    WINNOW_REAL_DATA=/data python -m tests.bench.stopping --root embedded=data --out docs/results

For recorded pass rates of 8 samples (the first and the last epoch of 605 prompts of DSR, 50 prompts
of MATH, and the profiles of data roots) it computes, exactly over all orders of the samples, the
mean number of samples, the share of prompts with the decision of the whole profile, and the share
of learnable prompts that are lost. The prior of `posterior` is fitted to the other half of the
prompts. A fixed smaller number of samples at equal cost is beside each rule. Writes stopping.csv
and stopping.svg."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import comb
from pathlib import Path

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tasks.common.artifacts import PROFILE, Layout
from tasks.common.files import replace_file
from tasks.common.statistics import fit_beta
from tasks.profile.settings import Stop
from tasks.profile.stopping import TRIVIAL, UNSOLVED, Rule, bucket_of, is_mixed, likely_bucket

SAMPLES = 8
STOP = Stop("posterior")
POSTERIOR = [*range(2, SAMPLES, 2)]


def ends(
    correct: int, stages: Sequence[int], rules: Sequence[Rule]
) -> Iterator[tuple[int, int, float]]:
    """Yield where a prompt with `correct` of 8 samples stops: its correct samples, its samples, and
    the probability over all orders. The last stage has no rule."""
    open_, before = {0: 1.0}, 0
    for stage, rule in zip(stages, [*rules, lambda *_: True], strict=True):
        reached: dict[int, float] = {}
        for seen, share in open_.items():
            for more in range(min(correct - seen, stage - before) + 1):
                drawn = comb(correct - seen, more) * comb(
                    SAMPLES - before - correct + seen, stage - before - more
                )
                ways = share * drawn / comb(SAMPLES - before, stage - before)
                reached[seen + more] = reached.get(seen + more, 0.0) + ways
        yield from ((k, stage, share) for k, share in reached.items() if share and rule(k, stage))
        open_, before = {k: v for k, v in reached.items() if v and not rule(k, stage)}, stage


def measure(
    counts: Sequence[int], stages: Sequence[int], rules: Sequence[Rule]
) -> tuple[float, float, float]:
    """Return the mean samples, the share of equal decisions, and the share of learnable prompts
    that are decided as unsolved or trivial, for prompts with these `counts` of 8."""
    decision = partial(bucket_of, STOP)
    samples = agree = lost = learnable = 0.0
    for correct in counts:
        whole = decision(correct, SAMPLES)
        learnable += whole not in (UNSOLVED, TRIVIAL)
        for k, n, share in ends(correct, stages, rules):
            samples += share * n
            agree += share * (decision(k, n) == whole)
            lost += share * (whole not in (UNSOLVED, TRIVIAL)) * (decision(k, n) in (0, -1))
    return samples / len(counts), agree / len(counts), lost / max(learnable, 1.0)


def posterior_rules(confidence: float, prior: tuple[float, float]) -> list[Rule]:
    stop = Stop("posterior", confidence=confidence)
    return [likely_bucket(stop, SAMPLES - stage, prior) for stage in POSTERIOR]


def crossed(counts: Sequence[int], confidence: float) -> tuple[float, float, float]:
    """Return `measure` under the rule `posterior`, with the prior of each half of the prompts
    fitted to the other half."""
    halves = [list(counts[half::2]) for half in range(2)]
    found = [
        measure(mine, [*POSTERIOR, SAMPLES], posterior_rules(confidence, fit_beta(other, SAMPLES)))
        for mine, other in (halves, halves[::-1])
    ]
    weights = [len(half) for half in halves]
    learnable = [sum(1 <= k <= 6 for k in half) for half in halves]
    samples, agree = (np.average([row[n] for row in found], weights=weights) for n in range(2))
    lost = np.average([row[2] for row in found], weights=learnable) if sum(learnable) else 0.0
    return float(samples), float(agree), float(lost)


def rows(name: str, counts: Sequence[int]) -> Iterator[dict[str, str | float]]:
    """Yield a row for each rule, with what a fixed number of samples of equal cost reaches: a
    mixture of the two nearest whole numbers."""
    fixed = [measure(counts, [number], []) for number in range(1, SAMPLES + 1)]
    found = {f"fixed {number}": row for number, row in enumerate(fixed, start=1)}
    found["mixed"] = measure(counts, [2, 4, SAMPLES], [is_mixed, is_mixed])
    for confidence in (0.8, 0.9, 0.95):
        found[f"posterior {confidence:g}"] = crossed(counts, confidence)
    for rule, (samples, agree, lost) in found.items():
        equal = np.interp(samples, range(1, SAMPLES + 1), [row[1] for row in fixed])
        yield {
            "pool": name,
            "prompts": len(counts),
            "rule": rule,
            "samples": round(samples, 3),
            "agree": round(agree, 4),
            "lost": round(lost, 4),
            "fixed_agree": round(float(equal), 4),
        }


def recorded(folder: Path) -> dict[str, list[int]]:
    """Return the recorded numbers of successes in 8 samples."""
    history = json.loads((folder / "dsr_sub_acc_history.json").read_text())
    lines = (folder / "qwen25math_math100x8.jsonl").read_text().splitlines()
    return {
        "DSR, first epoch": [round(SAMPLES * rates[0]) for rates in history.values()],
        "DSR, last epoch": [round(SAMPLES * rates[-1]) for rates in history.values()],
        "MATH": [sum(map(bool, json.loads(line)["score"])) for line in lines],
    }


def of_root(root: Path) -> list[int]:
    """Return the successes of the prompts of a data root with 8 graded samples."""
    path = Layout(root).profile / "profile.parquet"
    profile = PROFILE.read_columns(path, ["correct", "num_samples", "error"])
    whole = profile.filter(pl.col("num_samples") - pl.col("error") == SAMPLES)
    if whole.is_empty():
        raise SystemExit(f"{path} has no prompt with {SAMPLES} graded samples")
    counts: list[int] = whole["correct"].to_list()
    return counts


def write_figure(path: Path, table: pl.DataFrame) -> None:
    pools = table["pool"].unique(maintain_order=True).to_list()
    with mpl.rc_context({"svg.hashsalt": "winnow", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(2.6 * len(pools), 3.2), layout="constrained")
        panels = figure.subplots(1, len(pools), sharey=True, squeeze=False)[0]
        for panel, pool in zip(panels, pools, strict=True):
            mine = table.filter(pool=pool)
            for place, kind in enumerate(("fixed", "mixed", "posterior")):
                part = mine.filter(pl.col("rule").str.starts_with(kind))
                marks = {"marker": "osD"[place], "color": f"C{place}", "markersize": 4}
                panel.plot(part["samples"], part["agree"], label=kind, **marks)
            panel.set_title(pool, fontsize=9)
            panel.set_xlabel("samples a prompt")
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("prompts with the same decision")
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panels[0].legend(fontsize=8)
        metadata = {"Date": None, "Creator": None}
        replace_file(path, lambda stream: figure.savefig(stream, format="svg", metadata=metadata))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root",
        type=lambda pair: pair.partition("="),
        nargs="*",
        default=[],
        help="name=data root",
    )
    parser.add_argument("--out", type=Path, help="folder of stopping.csv and stopping.svg")
    arguments = parser.parse_args()
    folder = os.environ.get("WINNOW_REAL_DATA")
    pools: Mapping[str, list[int]] = {
        **(recorded(Path(folder) / "rollouts") if folder else {}),
        **{name: of_root(Path(root)) for name, _, root in arguments.root},
    }
    table = pl.DataFrame([row for name, counts in pools.items() for row in rows(name, counts)])
    with pl.Config(tbl_rows=-1, tbl_cols=-1, float_precision=3):
        print(table)
    if arguments.out is not None:
        table.write_csv(arguments.out / "stopping.csv")
        write_figure(arguments.out / "stopping.svg", table)


if __name__ == "__main__":
    main()
