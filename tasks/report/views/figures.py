"""The figures of the report: the data and the axes of each. `charts` makes their parts."""

from collections.abc import Mapping
from html import escape

import polars as pl

from tasks.report.curves import AXES, axis_unit, axis_words
from tasks.report.results import Results
from tasks.report.views.charts import (
    Chart,
    Trace,
    Variant,
    band,
    bars,
    chart,
    colour,
    css,
    dots,
    line,
    rows_layout,
    variant,
)

# the parts of the bill by name
PART_WORDS = {
    "profile": "profiling",
    "generate": "generating",
    "score": "scoring",
    "update": "updating",
}
# values shown over the steps: the column in `steps_binned`, the axis, whether it is a share
STEP_SERIES = {
    "rollouts with an advantage": ("alive", "share of rollouts with a nonzero advantage", True),
    "reward": ("reward_mean", "mean reward", False),
    "length": ("completion_tokens_mean", "mean tokens of a completion", False),
    "entropy": ("entropy", "entropy of a token, nats", False),
    "KL": ("kl", "KL from the reference policy, nats", False),
    "truncated": ("truncated_rate", "share of truncated completions", True),
}
HEIGHT = 300  # pixels of the charts on the first screen
NUM_BINS = 24  # bins of steps
DOT_SHARE = 0.55  # share of the line's colour, for single validations


def legend(colours: Mapping[str, int]) -> str:
    """Return one button per recipe, which shows or hides the recipe in all figures."""
    buttons = [
        f'<button type="button" class="key" aria-pressed="true" data-recipe="{escape(recipe)}">'
        f'<i style="background:{css(index)}"></i>{escape(recipe)}</button>'
        for recipe, index in colours.items()
    ]
    return "".join(buttons)


def accuracy(results: Results) -> Chart:
    """Return a chart of validation accuracy against each axis."""
    variants = {axis: accuracy_over(results, axis) for axis in results.evidence.axes}
    return chart("validation accuracy over what was spent, a fitted line per recipe", variants)


def accuracy_over(results: Results, axis: str) -> Variant:
    """Return validation accuracy against one axis: a fitted line per recipe with its band, dotted
    before its first point, and a dot per validation of each seed."""
    column, curves, colours = AXES[axis], results.curves, results.colours
    size, name = axis_unit(axis, float(curves[column].max() or 0.0))  # type: ignore[arg-type]
    traces: list[Trace] = []
    for recipe, index in colours.items():
        fitted = results.fits[recipe][axis]
        xs = (fitted.curve.flops / size).tolist()
        ys = fitted.curve.accuracy.tolist()
        low, high = (ends.tolist() for ends in fitted.band())
        ends = [f"{a:.1%} to {b:.1%}" for a, b in zip(low, high, strict=True)]
        hover = f"%{{y:.1%}} (%{{customdata}}) with %{{x:,.4~g}} {name}"
        traces.append(band(index, xs, low, high, group=recipe))
        traces.append(line(recipe, index, xs, ys, hover, group=recipe, customdata=ends))
        lead = line(recipe, index, [0.0, xs[0]], [ys[0]] * 2, "", group=recipe, hoverinfo="skip")
        traces.append(lead | {"line": {**lead["line"], "dash": "dot"}})
    for (run,), part in curves.group_by("run", maintain_order=True):
        recipe = part["recipe"][0]
        xs, ys = (part[column] / size).to_list(), part["accuracy"].to_list()
        hover = f"%{{y:.1%}} with %{{x:,.4~g}} {name}"
        shown = dots(str(run), colours[recipe], xs, ys, hover, group=recipe, share=DOT_SHARE)
        traces.append(shown)
    words, layout = axis_words(axis, name), {"xaxis_rangemode": "tozero", "height": HEIGHT}
    return variant(traces, words, "validation accuracy", percent="y", **layout)


def over_steps(results: Results) -> Chart:
    trained = results.evidence.trained
    binned = {run.name: steps_binned(run.steps, run.rollouts) for run in trained}
    variants = {}
    for name, (column, words, is_share) in STEP_SERIES.items():
        traces = []
        for run in trained:
            part = binned[run.name].drop_nulls(column)
            hover = f"%{{y:{'.1%' if is_share else '.4~g'}}} in steps around %{{x:.0f}}"
            xs, ys = part["middle"].to_list(), part[column].to_list()
            index = results.colours[run.recipe]
            traces.append(line(run.name, index, xs, ys, hover, group=run.recipe))
        variants[name] = variant(traces, "step", words, percent="y" * is_share)
    return chart("what training measured over its steps", variants)


def steps_binned(steps: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return the means of STEP_SERIES in at most NUM_BINS bins of steps. Steps without a finite
    value are skipped (such as KL without an update). Replayed rollouts are not counted."""
    width = max(1, -(-len(steps) // NUM_BINS))
    alive = rollouts.group_by("step").agg((pl.col("advantage") != 0).sum().alias("num_alive"))
    shares = pl.col("num_alive").sum() / pl.col("num_rollouts").sum()
    means = [column for column, _, _ in STEP_SERIES.values() if column != "alive"]
    finite = [pl.col(name).filter(pl.col(name).is_finite()).mean() for name in means]
    counted = steps.join(alive, on="step", how="left", maintain_order="left")
    return counted.group_by(pl.col("step") // width, maintain_order=True).agg(
        pl.col("step").mean().alias("middle"),
        pl.when(pl.col("num_rollouts").sum() > 0).then(shares).alias("alive"),
        *finite,
    )


def tested(results: Results) -> Chart:
    """Return a chart of test pass@1 with its interval, of the recipes and the initial policy."""
    found, colours = results.tested, results.colours
    names = sorted(found, key=lambda name: -found[name]["mean"])
    layout = rows_layout(names)
    layout |= {"height": max(HEIGHT, layout["height"])}
    traces = [interval(name, colours.get(name), found[name]) for name in names]
    one = variant(traces, "test pass@1, 95 % interval", "", percent="x", **layout)
    return chart("test pass@1, with 95 % intervals", {"pass@1": one})


def interval(name: str, index: int | None, estimate: Mapping[str, float]) -> Trace:
    """Return a dot with its interval in the row `name`, which is a recipe if it has an index."""
    mean, low, high = (estimate[key] for key in ("mean", "low", "high"))
    hover = f"%{{x:.1%}} ({low:.1%} to {high:.1%})"
    group = "" if index is None else name
    trace = dots(name, index, [mean], [escape(name)], hover, group=group)
    arrays = {"symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
    return trace | {"error_x": {"type": "data", "color": colour(index), **arrays}}


def by_level(results: Results) -> Chart:
    """Return a chart of test pass@1 by level before (grey) and after training, as the mean over the
    seeds."""
    initial = results.evidence.baseline["levels"]
    levels = sorted(initial, key=level_order)
    names = {level: f"{level} (n={initial[level]['num_prompts']})" for level in levels}
    hover = "%{y}: %{x:.1%}, %{fullData.name}"
    before = [initial[level]["pass_at_1"] for level in levels]
    ticks = [escape(names[level]) for level in levels]
    traces = [bars("initial policy", before, ticks, "@initial", hover, orientation="h")]
    for recipe, index in results.colours.items():
        metrics = [run.metrics["levels"] for run in results.evidence.seeds(recipe)]
        after = {}
        for level in levels:
            # a level with only errors is not in the metrics
            shares = [one[level]["pass_at_1"] for one in metrics if level in one]
            if shares:
                after[escape(names[level])] = sum(shares) / len(shares)
        xs, ys = list(after.values()), list(after)
        traces.append(bars(recipe, xs, ys, colour(index), hover, group=recipe, orientation="h"))
    layout = {"barmode": "group", "xaxis_range": [0, 1]}
    layout |= rows_layout(list(names.values()), max(1, len(traces) // 2))
    one = variant(traces, "test pass@1", "", percent="x", **layout)
    return chart("pass@1 by level, before and after training", {"level": one})


def level_order(level: str) -> tuple[int, float, str]:
    """Return a sort key for levels: numbers by value, then words."""
    try:
        return 0, float(level), level
    except ValueError:
        return 1, 0.0, level
