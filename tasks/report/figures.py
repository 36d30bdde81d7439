"""The figures of the report, from the evidence: what goes on which axis. How it is drawn is in
`charts`."""

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
from tasks.report.leaderboard import Row

PART_WORDS = {
    "profile": "profiling",
    "generate": "generating",
    "score": "scoring",
    "update": "updating",
    "lost": "lost to kills",
}
PART_SHARE = {"profile": 1.0, "generate": 0.72, "score": 0.55, "update": 0.38, "lost": 0.15}
NUM_BINS = 12
MAX_PASSES = 5


def colours(evidence: Evidence) -> dict[str, int]:
    """A colour a recipe, the same in every figure."""
    return {plan.recipe: index for index, plan in enumerate(evidence.plans)}


def legend(evidence: Evidence, *more: tuple[str, str]) -> str:
    """The recipes' colours, and `more` entries of (name, CSS style)."""
    entries = [
        (recipe, f"background:{colour(index)}") for recipe, index in colours(evidence).items()
    ]
    return keys([*entries, *more])


def keys(entries: Sequence[tuple[str, str]]) -> str:
    """A line of colours, as CSS, and what they stand for."""
    shown = [
        f'<span class="key"><i style="{style}"></i>{escape(name)}</span>' for name, style in entries
    ]
    return f'<p class="legend">{"".join(shown)}</p>'


def accuracy_over(evidence: Evidence, curves: pl.DataFrame, account: str) -> str:
    """Validation accuracy over charged or executed FLOPs, a line per recipe and seed."""
    column = f"flops_{account}"
    size, name = unit(float(curves[column].max() or 0.0))  # type: ignore[arg-type]
    few = curves["run"].n_unique() <= 4
    lines = []
    for (run,), part in curves.group_by("run", maintain_order=True):
        bands = (
            (part["accuracy_low"].to_list(), part["accuracy_high"].to_list()) if few else ([], [])
        )
        xs, ys = (part[column] / size).to_list(), part["accuracy"].to_list()
        index = colours(evidence)[part["recipe"][0]]
        lines.append(Line(str(run), index, xs, ys, *bands, lead=True))
    words = f"validation accuracy over {account} compute, a line per recipe and seed"
    return line_chart(lines, f"{account} compute, {name}", "validation accuracy", words)


def signal_over_steps(evidence: Evidence) -> str:
    """The share of groups with both a success and a failure, in bins of steps: only these carry a
    gradient."""
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
    """How many prompts have each pass rate, and what this recipe does with them: the darker, the
    larger the group."""
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
    """A bar for each pass rate that occurs; tenths where there are more than twelve; `none` for the
    ungraded."""
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
    """Grey for what is left out; the recipe's colour, stronger with the group size, for what is
    trained on."""
    if not group_size:
        return "fill:var(--left-out)"
    return tint(colours(evidence)[plan.recipe], 0.35 + 0.65 * group_size / largest)


def calibration(passes: Sequence[Drift], index: int, name: str) -> str:
    """Success in training over the profiled pass rate, a line per pass, the later the stronger, and
    their legend.

    Of many passes, a few; the interval is drawn on the last one only, where the question is whether
    it moved."""
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
    """At most MAX_PASSES of them, the first and the last among them."""
    count = min(len(passes), MAX_PASSES)
    return [passes[place * (len(passes) - 1) // max(count - 1, 1)] for place in range(count)]


def pass_line(one: Drift, index: int, strength: float) -> Line:
    """The bins of a pass as a curve."""
    last, xs, ys = strength == 1.0, column(one, "profiled"), column(one, "success")
    low, high = (column(one, key) if last else [] for key in ("success_low", "success_high"))
    return Line(f"pass {one['pass']}", index, xs, ys, low, high, strength=strength)


def column(one: Drift, key: str) -> list[float]:
    return [row[key] for row in one["bins"]]


def compute_parts(evidence: Evidence, rows: Sequence[Row], account: str) -> str:
    """Where the FLOPs of each run went, in one account."""
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
    """Test pass@1 on each level before (grey) and after training, mean over the seeds."""
    rows = []
    for level, before in sorted(
        evidence.baseline["levels"].items(), key=lambda item: level_order(item[0])
    ):
        dots = [("initial", before["pass_at_1"], "var(--initial)")]
        for plan in evidence.plans:
            levels = [run.metrics["levels"] for run in evidence.seeds(plan.recipe)]
            after = [
                found[level]["pass_at_1"] for found in levels if level in found
            ]  # all errors: no such level
            if after:
                dots.append(
                    (plan.recipe, sum(after) / len(after), colour(colours(evidence)[plan.recipe]))
                )
        rows.append((f"{level} (n={before['num_prompts']})", dots))
    return dot_chart(rows, "test pass@1", "pass@1 by level, before and after training")


def level_order(level: str) -> tuple[int, float, str]:
    """Numbers in their order, words after them."""
    try:
        return 0, float(level), level
    except ValueError:
        return 1, 0.0, level
