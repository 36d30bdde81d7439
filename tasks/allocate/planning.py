"""From a profile to a plan: each prompt's visits, their order, the group sizes and the reasons.

A strategy (one file in `strategies/`) decides the content of a pass. This module turns its phases
into the PLAN table, and its decisions into the DECISIONS table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np
import polars as pl

from tasks.allocate import strategies
from tasks.common import registry
from tasks.common.artifacts import DECISIONS, PLAN
from tasks.common.params import ParamsError, at_least, gathered, share


@dataclass(frozen=True)
class Allocation:
    """The result of a strategy: its phases in order (columns row, group_size, pass), and its
    decisions: the DECISIONS table with the prompt's `row` in the profile, not its id."""

    phases: list[pl.DataFrame]
    decisions: pl.DataFrame


class EmptyPlanError(ParamsError):
    """Raised if the strategy selects no prompts to train on."""


def phase(number: int, rows: pl.Series, group_size: int) -> pl.DataFrame:
    """Return one phase of pass `number`: the prompts in these rows of the profile, in this order,
    each with `group_size` rollouts."""
    return pl.DataFrame({"row": rows}).with_columns(
        pl.lit(group_size, pl.Int32).alias("group_size"), pl.lit(number, pl.Int32).alias("pass")
    )


def shuffled(rows: pl.Series, rng: np.random.Generator) -> pl.Series:
    """Return the same prompts in a random order."""
    return rows.gather(rng.permutation(len(rows)))


def decide(
    profile: pl.DataFrame, rows: pl.Series, decision: str, group_size: int, reason: str
) -> pl.DataFrame:
    """Return a table that gives each prompt in `rows` the same `decision`. Each reason begins with
    the observed counts."""
    graded = pl.col("num_samples") - pl.col("error")
    known = profile.select("row", "pass_rate", "correct", graded=graded)[rows]
    # one text for equal counts, however many prompts have them
    counts = known.select("correct", "graded").unique()
    observed = pl.format("solved {} of {}; {}", "correct", "graded", pl.lit(reason))
    return known.join(
        counts.with_columns(reason=observed), on=["correct", "graded"], maintain_order="left"
    ).select(
        "row",
        "pass_rate",
        pl.lit(decision).alias("decision"),
        pl.lit(group_size, pl.Int32).alias("group_size"),
        "reason",
    )


def solved_words(size: int, sizes: list[int]) -> str:
    """Return a description of the pass rates that bucket `size` of the ascending `sizes` covers."""
    if len(sizes) == 1:
        return "the only group size"
    if size == sizes[-1]:
        return f"at most one success in {size} expected"
    return f"a success expected in fewer than {sizes[sizes.index(size) + 1]} rollouts"


def load_strategy(spec: Mapping[str, Any]) -> tuple[ModuleType, Callable[..., Allocation]]:
    """Return the module of a recipe's strategy, and its `allocate(profile, passes, rng)` with the
    settings bound. Raise ParamsError for unknown names, or group sizes or shares out of range."""
    module = registry.load(strategies, spec.get("strategy"), "allocate.strategy")
    settings = {key: value for key, value in spec.items() if key != "strategy"}
    bound = registry.bind(module.allocate, settings, "allocate")
    check_ranges(settings)

    def allocate(profile: pl.DataFrame, passes: int, rng: np.random.Generator) -> Allocation:
        return cast(Allocation, bound(profile.with_row_index("row"), passes, rng))

    return module, allocate


def check_ranges(settings: Mapping[str, Any]) -> None:
    """Raise ParamsError for a `group_size` below 1, for `buckets` that are empty, repeated or below
    1, and for a `trivial_above` or `unsolved_rate` outside [0, 1]."""
    with gathered() as problems:
        problems.of(at_least, 1, allocate__group_size=settings.get("group_size", 1))
        shares = {key: settings.get(key, 0) for key in ("trivial_above", "unsolved_rate")}
        problems.of(share, **{f"allocate__{key}": value for key, value in shares.items()})
        sizes = sorted(settings.get("buckets", [1]))
        if not sizes or sizes[0] < 1 or len({*sizes}) < len(sizes):
            problems.add(
                f"allocate.buckets is {settings['buckets']}; it must list distinct group sizes of "
                "at least 1"
            )


def make_plan(phases: list[pl.DataFrame], profile: pl.DataFrame) -> pl.DataFrame:
    """Return the PLAN table of the phases, plus the column `row`. Raise EmptyPlanError with a
    histogram of the pass rates if there are no visits, and ParamsError for a group size below 1."""
    numbered = [
        frame.with_columns(
            pl.lit(number, pl.Int32).alias("phase"),
            pl.int_range(pl.len(), dtype=pl.Int64).alias("order"),
        )
        for number, frame in enumerate(frame for frame in phases if len(frame))
    ]
    if not numbered:
        raise EmptyPlanError(
            "the plan has no visit: every prompt was filtered out. Prompts by pass rate: "
            f"{histogram_words(profile)}. Raise trivial_above or unsolved_rate, add prompts of "
            "another difficulty, or use another policy"
        )
    if (smallest := min(int(frame["group_size"].min()) for frame in numbered)) < 1:  # type: ignore[arg-type]
        raise ParamsError(f"the plan has groups of {smallest}: a group size must be at least 1")
    plan = pl.concat(numbered)
    return plan.with_columns(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("visit"),
        prompt_id=profile["prompt_id"].gather(plan["row"]),
    ).select([*PLAN.columns, "row"])


def histogram_words(profile: pl.DataFrame) -> str:
    """Return the number of prompts at each pass rate as text: `0.000: 12, 0.125: 3, ...`."""
    counts = profile.group_by("pass_rate").len().sort("pass_rate", nulls_last=True)
    return ", ".join(
        f"{'ungraded' if r is None else format(r, '.3f')}: {n}" for r, n in counts.iter_rows()
    )


def check_decisions(decisions: pl.DataFrame, profile: pl.DataFrame) -> pl.DataFrame:
    """Return the DECISIONS table, in the profile's order. Raise AssertionError unless every prompt
    has exactly one decision."""
    rows = decisions["row"].to_numpy()
    if len(rows) != len(profile) or (np.bincount(rows, minlength=len(profile)) != 1).any():
        raise AssertionError("a strategy must decide every prompt exactly once")
    place = np.empty(len(rows), dtype=np.uint32)
    place[rows] = np.arange(len(rows), dtype=np.uint32)
    ordered = decisions.rechunk()[place].with_columns(prompt_id=profile["prompt_id"])
    return DECISIONS.check(ordered.drop("row"), "the decisions")
