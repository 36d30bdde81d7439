"""Figures of prompts by difficulty: the decisions of recipes on them, the tokens spent on them, and
the number of test prompts at each pass rate before and after training."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import polars as pl

from tasks.report.evidence import Evidence, Trained
from tasks.report.paired import CLASSES, INITIAL, Paired, class_of
from tasks.report.results import Results, name_of
from tasks.report.views.charts import Chart, Variant, bars, chart, colour, rows_layout, variant

UNKNOWN = "not known"  # the pass rate of a prompt with only error samples
CLASS_SHARE = (1.0, 0.8, 0.6, 0.42, 0.26, 0.12)  # strength of the colour, per class


def tokens_by_class(results: Results) -> Chart:
    """Return a chart of the tokens that each run sampled, by the profiled pass rate of their
    prompts: for all rollouts, and for those of advantage zero. Charged compute is proportional to
    tokens if the run trains on all rollouts."""
    evidence = results.evidence
    layout = {"barmode": "stack", **rows_layout([name_of(row) for row in results.rows])}
    variants = {}
    for name, dead in (("all rollouts", [True, False]), ("rollouts of advantage zero", [True])):
        traces = []
        for recipe, index in results.colours.items():
            runs = evidence.seeds(recipe)
            counts = np.array([class_tokens(evidence, run, dead) for run in runs])
            ys = [escape(run.name) for run in runs]
            for place, words in enumerate((*CLASSES, UNKNOWN)):
                hover = f"%{{y}}: %{{x:,}} tokens on prompts of pass rate {words}"
                xs = counts[:, place].tolist()
                hue = colour(index, CLASS_SHARE[place])
                traces.append(bars(words, xs, ys, hue, hover, group=recipe, orientation="h"))
        variants[name] = variant(traces, "tokens sampled in training", "", **layout)
    return chart("tokens by the profiled pass rate of their prompts", variants)


def class_tokens(evidence: Evidence, run: Trained, dead: Sequence[bool]) -> list[int]:
    """Return the number of tokens that a run sampled per class of pass rate, unknown rates last."""
    rates = evidence.profile.select("prompt_id", "pass_rate")
    spent = run.tokens.filter(pl.col("dead").is_in(list(dead)))
    known = spent.join(rates, on="prompt_id", how="inner").drop_nulls("pass_rate")
    counts = np.zeros(len(CLASSES), dtype=np.int64)
    np.add.at(counts, class_of(known["pass_rate"]), known["tokens"].to_numpy())
    return [*map(int, counts), int(spent["tokens"].to_numpy().sum() - counts.sum())]


def profile_histogram(profile: pl.DataFrame, run: Trained, index: int) -> Variant:
    """Return the number of prompts at each pass rate, by the decision of the recipe of `run`.
    Larger groups have a stronger colour."""
    joined = profile.select("prompt_id", "pass_rate").join(
        run.decisions.select("prompt_id", "decision", "group_size"), on="prompt_id", how="left"
    )
    counts = joined.group_by("pass_rate", "decision", "group_size").len().sort("pass_rate")
    rates = pass_rate_bars(counts)
    largest = max(run.decisions["group_size"].to_list(), default=1)
    kinds = counts.select("group_size", "decision").unique().sort("group_size", "decision")
    traces = []
    for size, decision in kinds.iter_rows():
        same = pl.col("decision").eq_missing(pl.lit(decision)) & (
            pl.col("group_size").eq_missing(pl.lit(size))
        )
        heights = [part.filter(same)["len"].sum() for _, part in rates]
        name = f"{decision}, group of {size}" if size else str(decision)
        hue = shade(index, size, largest)
        hover = "%{y} prompts at %{x}: %{fullData.name}"
        traces.append(bars(name, [rate for rate, _ in rates], heights, hue, hover))
    words = "pass rate in the profile"
    return variant(traces, words, "prompts", barmode="stack", xaxis_type="category")


def pass_rate_bars(counts: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    """Return (label, rows of `counts`) per pass rate, or per tenth if there are more than twelve
    rates; `none` is for ungraded prompts."""
    rates = counts["pass_rate"].drop_nulls().unique().sort()
    graded = counts.drop_nulls("pass_rate")
    if len(rates) <= 12:
        bars = [(f"{rate:.3g}", graded.filter(pl.col("pass_rate") == rate)) for rate in rates]
    else:
        tenth = (pl.col("pass_rate") * 10).floor().clip(0, 9)
        bars = [(f"{index / 10:g}+", graded.filter(tenth == index)) for index in range(10)]
    ungraded = counts.filter(pl.col("pass_rate").is_null())
    return [*bars, ("none", ungraded)] if len(ungraded) else bars


def shade(index: int, group_size: int | None, largest: int) -> str:
    """Return grey for excluded prompts, and for the others the recipe's colour, stronger for larger
    groups."""
    if not group_size:
        return "@left-out"
    return colour(index, 0.35 + 0.65 * group_size / largest)


def histograms(results: Results) -> Chart:
    profile = results.evidence.profile
    variants = {
        run.recipe: profile_histogram(profile, run, index)
        for index, run in enumerate(results.evidence.first_runs)
    }
    return chart("prompts by pass rate in the profile, and what a recipe does with them", variants)


def matrix(paired: Paired, runs: Sequence[str]) -> list[list[float]]:
    """Return the number of prompts that moved from each of CLASSES before training (rows) to each
    after it (columns), as the mean over the runs. Ungraded prompts are excluded."""
    counts = np.zeros((len(CLASSES), len(CLASSES)))
    for run in runs:
        graded = paired.rates.select(INITIAL, run).drop_nulls()
        np.add.at(counts, (class_of(graded[INITIAL]), class_of(graded[run])), 1.0)
    return [list(map(float, row)) for row in counts / len(runs)]


def transitions(results: Results) -> Chart:
    """Return a chart of each recipe's `matrix`, as the mean over its seeds."""
    variants = {}
    for recipe, index in results.colours.items():
        names = [run.name for run in results.evidence.seeds(recipe)]
        trace: dict[str, Any] = {
            "type": "heatmap",
            "x": list(CLASSES),
            "y": list(CLASSES),
            "z": matrix(results.paired, names),
            "texttemplate": "%{z:.4~g}",
            "showscale": False,
            "xgap": 2,
            "ygap": 2,
            "colorscale": [[0, "@raised"], [1, colour(index, 0.75)]],
            "hovertemplate": "%{z:.4~g} prompts from %{y} to %{x}<extra></extra>",
        }
        axes = {f"{axis}axis_type": "category" for axis in "xy"}
        variants[recipe] = variant([trace], "pass rate after", "pass rate before", **axes)
    return chart("test prompts by pass rate before and after training", variants)
