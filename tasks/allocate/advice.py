"""Advice from a profile, before training: the number of learnable prompts, the recipe with
the most information about the gradient per unit of compute, and whether profiling pays.

If the noise of a rollout's score dominates, a group of G rollouts of a prompt with pass rate p has
information in proportion to (G - 1) p (1 - p) (see `judgement`). A recipe's information is that of
its plan, times the number of such plans that the budget pays for after the profile. This is a
model: pass rates stay at the profiled rates, and the slots' effects during the run are excluded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from tasks.allocate import budget
from tasks.allocate.judgement import expected, judge, judgement_words, totals
from tasks.allocate.planning import load_strategy
from tasks.common import recipes
from tasks.common.accounting.ledger import Architecture
from tasks.common.accounting.success import without_success
from tasks.common.artifacts import OUTCOMES
from tasks.common.checksums import read_checked, read_note
from tasks.common.layout import Layout
from tasks.train.needs import read_train
from tasks.train.settings import SLOTS, TrainSettings

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Forecast:
    """The expected results of a recipe. `profile` is the share of its compute spent on the profile,
    `mixed` the share of its `rollouts` in mixed groups, `information` the (relative) information
    about the gradient per unit of compute, and `left_out` the slots that are not modelled."""

    recipe: str
    profile: float
    rollouts: float
    mixed: float
    information: float
    left_out: list[str]


def advise(values: Values, layout: Layout) -> Iterator[str]:
    """Yield the lines of the advice; `values` are all parameters. Raise ArtifactError if there is
    no profile."""
    profile = budget.read_profile(layout)
    yield prompts_words(profile)
    if words := without_success(profile.select(OUTCOMES).sum().row(0, named=True)):
        yield words
        return
    names = values["experiment"]["recipes"]
    forecasts = [forecast_of(values, layout, profile, name) for name in names]
    yield from table(forecasts)
    yield sentence(forecasts)
    for name in names:
        chosen = recipes.recipe(values, name)
        if load_strategy(chosen["allocate"])[0].reads_profile:
            compared = budget.compared_plan(values, profile, name)
            if compared.uniform.sizes[0] > 1:  # groups of one have no contrast to judge
                yield f"{name}: {judgement_words(judge(compared))}."
    yield next_words(layout, names)


def forecast_of(values: Values, layout: Layout, profile: pl.DataFrame, name: str) -> Forecast:
    """Return the forecast of the recipe `name` at `experiment.budget`; without a budget, for its
    whole plan, in the account `executed`."""
    chosen, limit = recipes.recipe(values, name), budget.budget_of(values)
    account, train = limit.account if limit else "executed", read_train(chosen["train"])
    card = read_checked(layout.policy_card)
    architecture = Architecture(**{key: card[key] for key in Architecture.__dataclass_fields__})
    compared = budget.compared_plan(values, profile, name)
    plan, profiled = budget.planned(compared, train), 0.0
    if budget.is_profile_charged(chosen):
        profiled = budget.profile_cost(layout, account, architecture)
    rollouts = budget.rollouts_of(limit, architecture, plan, train, profiled)
    compute = profiled + rollouts * budget.rollout_cost(account, architecture, plan, train)
    lengths = plan.prompt, plan.completion
    compute += budget.warm_start_cost(account, architecture, *lengths, train)
    information, _ = totals(compared.plan.counted, expected(compared.prior))
    return Forecast(
        name,
        profiled / compute,
        rollouts,
        plan.mixed,
        information * rollouts / plan.rollouts / compute,
        left_out(train),
    )


def left_out(train: TrainSettings) -> list[str]:
    """Return the slots that the forecast does not model: those with a method other than the default
    or `mixed`, and `shape` if it is used."""
    plain = TrainSettings()
    counted = {slot: {getattr(plain, slot)["method"], "mixed"} for slot in SLOTS}
    found = [slot for slot in SLOTS if getattr(train, slot)["method"] not in counted[slot]]
    return found + ["shape"] * bool(train.shape)


def prompts_words(profile: pl.DataFrame) -> str:
    """Return a sentence about how many prompts had equal rewards in the profile."""
    graded = pl.col("num_samples") - pl.col("error")
    never, always = profile.select(
        ((pl.col("correct") == 0) & (graded > 0)).sum().alias("never"),
        ((pl.col("correct") == graded) & (graded > 0)).sum().alias("always"),
    ).row(0)
    share = (never + always) / len(profile)
    return (
        f"Of {len(profile):,} prompts {never:,} were never solved and {always:,} always: "
        f"{share:.0%} had equal rewards."
    )


def table(forecasts: list[Forecast]) -> Iterator[str]:
    """Yield the lines of a table of recipes. Information is shown relative to the largest value."""
    width, most = (
        max(len(row.recipe) for row in forecasts) + 2,
        max(row.information for row in forecasts),
    )
    head = ("profile", "rollouts", "in mixed groups", "information")
    yield f"{'recipe':{width}}" + "".join(f"{name:>17}" for name in head)
    for row in forecasts:
        cells = (
            f"{row.profile:.0%}",
            f"{row.rollouts:,.0f}",
            f"{row.mixed:.0%}",
            f"{row.information / (most or 1.0):.2f}" + "*" * bool(row.left_out),
        )
        yield f"{row.recipe:{width}}" + "".join(f"{cell:>17}" for cell in cells)
    if marked := [f"{row.recipe} ({', '.join(row.left_out)})" for row in forecasts if row.left_out]:
        yield f"* without the effect of slots that the forecast does not model: {'; '.join(marked)}"


def sentence(forecasts: list[Forecast]) -> str:
    """Return a sentence: which recipe has the most information, or that too few are modelled."""
    covered = [row for row in forecasts if not row.left_out]
    if len(covered) < 2:
        return "The forecast covers fewer than two of the recipes: only a run compares them."
    best, second = sorted(covered, key=lambda row: -row.information)[:2]
    share = second.information / (best.information or 1.0)
    return (
        f"By the forecast `{best.recipe}` has the most information about the gradient for its "
        f"compute, and `{second.recipe}` {share:.0%} of it."
    )


def next_words(layout: Layout, names: list[str]) -> str:
    """Return a sentence with the next command, or the first sentence of the report if it compares
    exactly these recipes."""
    path = layout.report / "summary.json"
    if not path.exists():
        return "No runs are compared yet: `winnow run` trains and compares them."
    summary = read_checked(path)
    for cell, policy in summary["policies"].items():
        recipe, _, seed = cell.partition("/")
        if read_note(layout.trained_card(recipe, int(seed))).get("digest") != policy:
            return f"The report is stale: {cell} has other weights now. Run `winnow run`."
    if set(summary["recipes"]) != set(names):
        there = ", ".join(summary["recipes"])
        return f"The report compares {there}: `winnow run` brings it up to date."
    return f"After the runs: {summary['headline']}"
