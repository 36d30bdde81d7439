"""The stage `allocate`: from the profile to a recipe's plan, with the reason of every decision."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tasks.allocate.forecast import forecast, reading_slots
from tasks.allocate.gates import check_gates
from tasks.allocate.judgement import judge, judgement_words
from tasks.allocate.planning import check_decisions, load_strategy, make_plan
from tasks.allocate.settings import AllocateSettings, Gates
from tasks.allocate.visits import compare
from tasks.common import params, recipes, stage
from tasks.common.artifacts import DECISIONS, PLAN, PROFILE, ROLLOUTS, SAMPLES
from tasks.common.files import digest_file
from tasks.common.ledger import Architecture
from tasks.common.sealed import read_sealed, write_sealed
from tasks.common.spending import LENGTHS, CellBudget, generation_cost, rows_in
from tasks.engines.settings import Sampling
from tasks.train.settings import SLOTS, TrainSettings, with_method

logger = logging.getLogger(__name__)


def main(run: stage.Stage) -> None:
    """Apply the recipe's strategy, and write the plan, the decisions and the forecast; and the
    profile's samples of the plan's prompts, where a slot of the recipe reads them."""
    recipe, seed = run.coordinates()
    settings = run.section("allocate", AllocateSettings)
    layout = run.layout
    chosen = recipes.recipe(run.params, recipe)
    train = asdict(params.parse(chosen["train"], TrainSettings, "train"))
    train |= {slot: with_method(slot, train[slot]) for slot in SLOTS}
    spec, readers = chosen["allocate"], reading_slots(train)
    strategy, allocate = load_strategy(spec)
    # in one chunk, from which rows are taken ten times as fast
    profile = PROFILE.read(layout.profile / "profile.parquet").rechunk()
    check_gates(run.section("gates", Gates), profile, run.section("sampling", Sampling).max_tokens)
    card = read_sealed(layout.policy_card)
    architecture = Architecture(**{name: card[name] for name in Architecture.__dataclass_fields__})
    run.tracker.params({"allocate": {**asdict(settings), **spec}})
    run.tracker.dataset(
        "profile",
        layout.profile / "profile.parquet",
        digest_file(layout.profile / "profile.parquet"),
        "allocate",
    )

    rng = np.random.default_rng([settings.seed, seed])
    allocation = allocate(profile, settings.passes, rng)
    plan = make_plan(allocation.phases, profile)
    decisions = check_decisions(allocation.decisions, profile)
    compared, reads_profile = compare(plan, profile), strategy.reads_profile or bool(readers)
    expected = forecast(
        compared,
        architecture,
        reads_profile=reads_profile,
        strategy=str(spec["strategy"]),
        train=train,
    )
    if strategy.reads_profile:
        expected["judgement"] = judge(compared)
    warn_if_few_learnable(profile, expected["plan"]["mixed_rate"])
    log_plan(decisions, expected)

    out = layout.plan(recipe, seed)
    PLAN.write(out / "plan.parquet", plan.drop("row"))
    DECISIONS.write(out / "decisions.parquet", decisions)
    samples = SAMPLES.frame([])
    if readers:
        # by name: it needs the store, and with it torch, which no other recipe does
        samples = importlib.import_module(".samples", __package__).samples_of(run, plan)
        logger.info("%d samples of the profile for train.%s", len(samples), ", ".join(readers))
    SAMPLES.write(out / "samples.parquet", samples)
    write_budget(run, out / "budget.json", architecture, recipe if reads_profile else None)
    write_sealed(out / "forecast.json", expected)
    run.tracker.metrics({key: float(value) for key, value in expected["plan"].items()})
    for name in ("plan.parquet", "forecast.json"):
        run.tracker.artifact(out / name)


def log_plan(decisions: pl.DataFrame, expected: Mapping[str, Any]) -> None:
    """Log what was decided about the prompts, and what is expected of the plan."""
    counts = decisions.group_by("decision").len().sort("len", descending=True)
    for decision, count in counts.iter_rows():
        logger.info("%s: %d of %d prompts", decision, count, len(decisions))
    logger.info(
        "%(visits)d visits, %(rollouts)d rollouts, %(mixed_groups).0f mixed groups expected",
        expected["plan"],
    )
    if "judgement" in expected:
        logger.info("%s", judgement_words(expected["judgement"]))


def write_budget(
    run: stage.Stage, path: Path, architecture: Architecture, reader: str | None
) -> None:
    """Write what the cell may spend; a recipe that reads the profile (`reader` is its name) pays
    for it. Raises ParamsError where the profile alone costs as much."""
    budget = run.section("experiment", params.Experiment).budget
    if budget is None:
        write_sealed(path, {"budget": None})
        return
    spent = 0.0
    if reader is not None:
        rows = ROLLOUTS.read_columns(run.layout.profile / "rollouts.parquet", list(LENGTHS))
        spent = generation_cost(budget.account, architecture, rows_in(rows))
    if spent >= budget.amount:
        raise params.ParamsError(
            f"experiment.budget is {budget.amount:.3g} of {budget.account}, and the profile, which "
            f"recipe '{reader}' reads, took {spent:.3g} of it: raise the amount, lower "
            "profile.num_samples, or leave the recipe out"
        )
    CellBudget(budget.account, budget.amount, spent).write(path)


def warn_if_few_learnable(profile: pl.DataFrame, mixed_rate: float) -> None:
    """Warn when this policy can learn from almost no prompt."""
    graded = pl.col("num_samples") - pl.col("error")
    is_learnable = (pl.col("correct") > 0) & (pl.col("correct") < graded)
    learnable = int(profile.select(is_learnable.sum()).item())
    if learnable >= 0.05 * len(profile):
        return
    logger.warning(
        "ONLY %d OF %d PROMPTS WERE SOLVED SOMETIMES BUT NOT ALWAYS: %.1f %% of the groups are "
        "expected to carry a gradient. Training would spend nearly all its compute on groups "
        "without one. Use easier prompts, a stronger policy, or a larger sampling.max_tokens if "
        "completions are cut off",
        learnable,
        len(profile),
        100 * mixed_rate,
    )
