"""Figures of prompts by how hard the profile found them: what became of them, and what was spent on
them."""

from collections.abc import Sequence
from html import escape

import numpy as np
import polars as pl

from tasks.report.charts import Chart, Variant, bars, chart, colour, rows_layout, variant
from tasks.report.evidence import Evidence, RecipePlan, Trained
from tasks.report.figures import colours
from tasks.report.leaderboard import Row
from tasks.report.transitions import CLASSES, class_of

UNKNOWN = "not known"  # the pass rate of a prompt of which every sample was an error
CLASS_SHARE = (1.0, 0.8, 0.6, 0.42, 0.26, 0.12)  # the strength of the colour of each


def tokens_by_class(evidence: Evidence, rows: Sequence[Row]) -> Chart:
    """Return the tokens that each training sampled, by the profiled pass rate of their prompts: of
    all groups, and of those that had no signal. Charged compute is in
    proportion to tokens, as far as what is sampled is also updated."""
    names = [f"{row['recipe']}/{row['seed']}" for row in rows]
    layout = {"barmode": "stack", **rows_layout(names)}
    variants = {}
    for name, mixed in (("all groups", [True, False]), ("groups without a signal", [False])):
        traces = []
        for recipe, index in colours(evidence).items():
            runs = evidence.seeds(recipe)
            counts = np.array([class_tokens(evidence, run, mixed) for run in runs])
            ys = [escape(run.name) for run in runs]
            for place, words in enumerate((*CLASSES, UNKNOWN)):
                hover = f"%{{y}}: %{{x:,}} tokens on prompts of pass rate {words}"
                xs = counts[:, place].tolist()
                hue = colour(index, CLASS_SHARE[place])
                traces.append(bars(words, xs, ys, hue, hover, group=recipe, orientation="h"))
        variants[name] = variant(traces, "tokens sampled in training", "", **layout)
    return chart("tokens by the profiled pass rate of their prompts", variants)


def class_tokens(evidence: Evidence, run: Trained, mixed: Sequence[bool]) -> list[int]:
    """Return the tokens of a training on prompts of each class, and on those not known."""
    rates = evidence.profile.select("prompt_id", "pass_rate")
    spent = run.tokens.filter(pl.col("mixed").is_in(list(mixed)))
    known = spent.join(rates, on="prompt_id", how="inner").drop_nulls("pass_rate")
    counts = np.zeros(len(CLASSES), dtype=np.int64)
    np.add.at(counts, class_of(known["pass_rate"]), known["tokens"].to_numpy())
    return [*map(int, counts), int(spent["tokens"].to_numpy().sum() - counts.sum())]


def profile_histogram(evidence: Evidence, plan: RecipePlan) -> Variant:
    """Return the number of prompts at each pass rate, and what this recipe does with them: the
    darker the colour, the larger the group."""
    joined = evidence.profile.select("prompt_id", "pass_rate").join(
        plan.decisions.select("prompt_id", "decision", "group_size"), on="prompt_id", how="left"
    )
    counts = joined.group_by("pass_rate", "decision", "group_size").len().sort("pass_rate")
    rates = pass_rate_bars(counts)
    largest = max(plan.decisions["group_size"].to_list(), default=1)
    kinds = counts.select("group_size", "decision").unique().sort("group_size", "decision")
    traces = []
    for size, decision in kinds.iter_rows():
        same = pl.col("decision").eq_missing(pl.lit(decision)) & (
            pl.col("group_size").eq_missing(pl.lit(size))
        )
        heights = [part.filter(same)["len"].sum() for _, part in rates]
        name = f"{decision}, group of {size}" if size else str(decision)
        hue = shade(colours(evidence)[plan.recipe], size, largest)
        hover = "%{y} prompts at %{x}: %{fullData.name}"
        traces.append(bars(name, [rate for rate, _ in rates], heights, hue, hover))
    words = "pass rate in the profile"
    return variant(
        traces, words, "prompts", barmode="stack", xaxis_type="category", showlegend=True
    )


def pass_rate_bars(counts: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    """Return a bar for each pass rate, or for each tenth if there are more than twelve; `none` is
    for ungraded prompts."""
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
    """Return grey for prompts that are left out, and for the others the recipe's colour, stronger
    for larger groups."""
    if not group_size:
        return "@left-out"
    return colour(index, 0.35 + 0.65 * group_size / largest)


def histograms(evidence: Evidence) -> Chart:
    """Return a histogram of the profile for each recipe."""
    variants = {plan.recipe: profile_histogram(evidence, plan) for plan in evidence.first_plans}
    return chart("prompts by pass rate in the profile, and what a recipe does with them", variants)
