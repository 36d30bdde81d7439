"""The figures of the report: which data go on which axis. `charts` draws them."""

from collections.abc import Sequence
from html import escape

import polars as pl

from tasks.report.charts import (
    Line,
    Piece,
    bar_chart,
    calibration_chart,
    colour,
    dot_chart,
    flops_words,
    line_chart,
    pale,
    stack_chart,
    tint,
    unit,
)
from tasks.report.drift import Drift
from tasks.report.evidence import Evidence, Plan
from tasks.report.leaderboard import Fits, Row

# the parts of the bill by name, and the strength of their colour
PART_WORDS = {
    "profile": "profiling",
    "generate": "generating",
    "score": "scoring",
    "update": "updating",
    "lost": "lost to kills",
}
PART_SHARE = {"profile": 1.0, "generate": 0.72, "score": 0.55, "update": 0.38, "lost": 0.15}
NUM_BINS = 12  # of steps
MAX_PASSES = 5  # in a calibration figure
MAX_BANDS = 4  # in a figure of accuracy
DOT_SHARE = 0.55  # of the line's colour, of single validations


def colours(evidence: Evidence) -> dict[str, int]:
    """Return a colour per recipe, the same in every figure."""
    return {plan.recipe: index for index, plan in enumerate(evidence.first_plans)}


def legend(evidence: Evidence, *more: tuple[str, str]) -> str:
    """Return the legend of the recipes' colours, and `more` entries of (name, CSS style)."""
    entries = [
        (recipe, f"background:{colour(index)}") for recipe, index in colours(evidence).items()
    ]
    return keys([*entries, *more])


def keys(entries: Sequence[tuple[str, str]]) -> str:
    """Return a line of colours (CSS) and their names."""
    shown = [
        f'<span class="key"><i style="{style}"></i>{escape(name)}</span>' for name, style in entries
    ]
    return f'<p class="legend">{"".join(shown)}</p>'


def accuracy_over(evidence: Evidence, curves: pl.DataFrame, fits: Fits, account: str) -> str:
    """Return validation accuracy over the FLOPs of an account: a fitted line per recipe, with its
    band where there are few, and a dot per validation of each seed."""
    column = f"flops_{account}"
    size, name = unit(float(curves[column].max() or 0.0))  # type: ignore[arg-type]
    lines = []
    for recipe, index in colours(evidence).items():
        fitted = fits[recipe][account]
        xs = (fitted.curve.flops / size).tolist()
        low, high = fitted.band() if len(fits) <= MAX_BANDS else ((), ())
        ys = fitted.curve.accuracy.tolist()
        lines.append(Line(recipe, index, xs, ys, list(low), list(high), lead=True, dots=False))
    for (run,), part in curves.group_by("run", maintain_order=True):
        index = colours(evidence)[part["recipe"][0]]
        xs = (part[column] / size).to_list()
        ys = part["accuracy"].to_list()
        lines.append(Line(str(run), index, xs, ys, strength=DOT_SHARE, joined=False))
    words = f"validation accuracy over {account} compute, a fitted line per recipe"
    return line_chart(lines, f"{account} compute, {name}", "validation accuracy", words)


def signal_over_steps(evidence: Evidence) -> str:
    """Return the share of groups with both a success and a failure, in bins of steps: only these
    carry a gradient."""
    lines = []
    for run in evidence.trained:
        width = max(1, -(-len(run.steps) // NUM_BINS))
        bins = run.steps.group_by(pl.col("step") // width, maintain_order=True).agg(
            pl.col("step").mean().alias("middle"),
            (pl.col("num_mixed_groups").sum() / pl.col("num_prompts").sum()).alias("mixed"),
        )
        if len(bins):
            index = colours(evidence)[run.recipe]
            lines.append(Line(run.name, index, bins["middle"].to_list(), bins["mixed"].to_list()))
    if not lines:
        return "<p>No training step was made.</p>"
    return line_chart(
        lines, "step", "groups with a signal", "share of mixed groups over the steps of training"
    )


def profile_histogram(evidence: Evidence, plan: Plan) -> str:
    """Return the number of prompts at each pass rate, and what this recipe does with them: the
    darker the colour, the larger the group."""
    joined = evidence.profile.select("prompt_id", "pass_rate").join(
        plan.decisions.select("prompt_id", "decision", "group_size"), on="prompt_id", how="left"
    )
    counts = (
        joined.group_by("pass_rate", "decision", "group_size")
        .len()
        .sort("pass_rate", "group_size", "decision")
    )
    rates = pass_rate_bars(counts)
    largest = max(plan.decisions["group_size"].to_list(), default=1)
    bars = []
    for name, part in rates:
        rows = (
            part.group_by("decision", "group_size")
            .agg(pl.col("len").sum())
            .sort("group_size", "decision")
        )
        pieces = [
            Piece(
                count,
                f"{decision}, group of {size}" if size else str(decision),
                shade(evidence, plan, size, largest),
            )
            for decision, size, count in rows.iter_rows()
        ]
        bars.append((name, pieces))
    words = f"prompts by pass rate and what {plan.recipe} does with them"
    return bar_chart(bars, "pass rate in the profile", "prompts", words)


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


def shade(evidence: Evidence, plan: Plan, group_size: int, largest: int) -> str:
    """Return grey for prompts that are left out, and for the others the recipe's colour, stronger
    for larger groups."""
    if not group_size:
        return "fill:var(--left-out)"
    return tint(colours(evidence)[plan.recipe], 0.35 + 0.65 * group_size / largest)


def calibration(passes: Sequence[Drift], index: int, name: str) -> str:
    """Return success in training over the profiled pass rate, a line per pass, later ones stronger,
    with a legend.

    Of many passes only a few are shown, and the interval only for the last one, where the question
    is whether it moved."""
    shown = spaced(passes)
    strengths = [1.0 - 0.7 * after / len(shown) for after in reversed(range(len(shown)))]
    lines = [
        pass_line(one, index, strength) for one, strength in zip(shown, strengths, strict=True)
    ]
    fresh = Line("expected", index, column(shown[-1], "profiled"), column(shown[-1], "expected"))
    words = f"success in training of {name} over the profiled pass rate, a line per pass"
    names = [(line.name, f"background:{pale(index, line.strength)}") for line in lines]
    return keys(names) + calibration_chart(
        lines, fresh, "pass rate in the profile", "success in training", words
    )


def spaced(passes: Sequence[Drift]) -> list[Drift]:
    """Return at most MAX_PASSES of the passes, the first and the last among them."""
    count = min(len(passes), MAX_PASSES)
    return [passes[index * (len(passes) - 1) // max(count - 1, 1)] for index in range(count)]


def pass_line(one: Drift, index: int, strength: float) -> Line:
    """Return the bins of a pass as a curve; only the last pass, at full strength, has a band."""
    is_last = strength == 1.0
    return Line(
        f"pass {one['pass']}",
        index,
        column(one, "profiled"),
        column(one, "success"),
        column(one, "success_low") if is_last else [],
        column(one, "success_high") if is_last else [],
        strength=strength,
    )


def column(one: Drift, key: str) -> list[float]:
    """Return one value of every bin of a pass."""
    return [row[key] for row in one["bins"]]


def compute_parts(evidence: Evidence, rows: Sequence[Row], account: str) -> str:
    """Return the FLOPs of each run by part, in one account."""
    size, name = unit(max(row[f"flops_{account}"]["total"] for row in rows))
    stacks = []
    for row in rows:
        index = colours(evidence)[row["recipe"]]
        pieces = [
            Piece(value / size, PART_WORDS[part], tint(index, PART_SHARE[part]))
            for part, value in row[f"flops_{account}"].items()
            if part != "total"
        ]
        total = flops_words(row[f"flops_{account}"]["total"])
        stacks.append((f"{row['recipe']}/{row['seed']}: {total}", pieces))
    return stack_chart(
        stacks, f"{account} compute, {name}", f"{account} compute by what it was spent on"
    )


def by_level(evidence: Evidence) -> str:
    """Return test pass@1 on each level before (grey) and after training, the mean over the
    seeds."""
    rows = []
    initial = evidence.baseline["levels"]
    for level in sorted(initial, key=level_order):
        before = initial[level]
        dots = [("initial", before["pass_at_1"], "var(--initial)")]
        for plan in evidence.first_plans:
            levels = [run.metrics["levels"] for run in evidence.seeds(plan.recipe)]
            # a level with nothing but errors is not in the metrics
            after = [found[level]["pass_at_1"] for found in levels if level in found]
            if after:
                hue = colour(colours(evidence)[plan.recipe])
                dots.append((plan.recipe, sum(after) / len(after), hue))
        rows.append((f"{level} (n={before['num_prompts']})", dots))
    return dot_chart(rows, "test pass@1", "pass@1 by level, before and after training")


def level_order(level: str) -> tuple[int, float, str]:
    """Return a sort key: numbers in their order, then words."""
    try:
        return 0, float(level), level
    except ValueError:
        return 1, 0.0, level
