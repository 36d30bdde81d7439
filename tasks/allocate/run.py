"""The stage `allocate`: from the profile to a recipe's plan, with a reason for every decision."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from tasks.allocate.budget import planned, profile_cost, read_profile, require_rest, warm_start_cost
from tasks.allocate.forecast import forecast
from tasks.allocate.judgement import judge, judgement_words
from tasks.allocate.planning import check_decisions, load_strategy, make_plan
from tasks.allocate.settings import AllocateSettings, Gates
from tasks.allocate.visits import Compared, compare
from tasks.common import params, recipes, stage
from tasks.common.accounting.ledger import Architecture
from tasks.common.accounting.spending import CellBudget
from tasks.common.artifacts import DECISIONS, PLAN, SAMPLES
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import digest_file, rounded
from tasks.engines.settings import Sampling
from tasks.train.needs import profile_readers, read_train
from tasks.train.settings import TrainSettings

logger = logging.getLogger(__name__)
ENDED = (
    "completions end after one token: set `raw: true` of the sources if the policy was not trained "
    "on chats, and remove `raw` and `prompt_template` if it was"
)


def main(run: stage.Stage) -> None:
    """Apply the recipe's strategy. Write the plan, decisions, forecast, budget and, for the plan's
    prompts, the profile's samples (no rows unless a slot or the warm start reads them)."""
    recipe, seed = run.coordinates()
    settings = run.section("allocate", AllocateSettings)
    layout = run.layout
    chosen = recipes.recipe(run.params, recipe)
    train = read_train(chosen["train"])
    spec, readers = chosen["allocate"], profile_readers(train)
    strategy, allocate = load_strategy(spec)
    profile = read_profile(layout)
    check_gates(run.section("gates", Gates), profile, run.section("sampling", Sampling).max_tokens)
    card = read_checked(layout.policy_card)
    architecture = Architecture(**{name: card[name] for name in Architecture.__dataclass_fields__})
    noted: dict[str, Any] = {"settings": {**asdict(settings), **spec}}
    noted["profile"] = digest_file(layout.profile / "profile.parquet")
    run.tracker.params({"allocate": noted["settings"]})
    run.tracker.dataset("profile", layout.profile / "profile.parquet", noted["profile"], "allocate")

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
    if strategy.reads_profile and compared.uniform.sizes[0] > 1:  # groups of 1 have no contrast
        expected["judgement"] = judge(compared)
    warn_if_few_learnable(profile, expected["plan"]["mixed_rate"])
    log_plan(decisions, expected)

    out = layout.plan(recipe, seed)
    PLAN.write(out / "plan.parquet", plan.drop("row"))
    DECISIONS.write(out / "decisions.parquet", decisions)
    samples = SAMPLES.frame([])
    if readers:
        # imported by name, because it loads the store and torch, which other recipes do not need
        samples = importlib.import_module(".samples", __package__).samples_of(run, plan)
        logger.info("%d samples of the profile for train.%s", len(samples), ", ".join(readers))
    SAMPLES.write(out / "samples.parquet", samples)
    write_budget(run, architecture, compared, train, reads_profile=reads_profile)
    write_checked(out / "forecast.json", {**rounded(expected), **noted})
    run.tracker.metrics({key: float(value) for key, value in expected["plan"].items()})
    for name in ("plan.parquet", "forecast.json"):
        run.tracker.artifact(out / name)


def write_budget(
    run: stage.Stage,
    architecture: Architecture,
    compared: Compared,
    train: TrainSettings,
    *,
    reads_profile: bool,
) -> None:
    """Write the compute that the recipe may spend with this seed. Raise ParamsError if the warm
    start, plus the profile for a recipe that reads it, costs at least the budget."""
    recipe, seed = run.coordinates()
    path = run.layout.plan(recipe, seed) / "budget.json"
    budget = run.section("experiment", params.Experiment).budget
    if budget is None:
        write_checked(path, {"budget": None})
        return
    account, plan = budget.account, planned(compared, train)
    spent = profile_cost(run.layout, account, architecture) if reads_profile else 0.0
    warm = warm_start_cost(account, architecture, plan.prompt, plan.completion, train)
    require_rest(budget, recipe, spent, warm)
    CellBudget(account, budget.amount, spent).write(path)


def check_gates(gates: Gates, profile: pl.DataFrame, max_tokens: int) -> None:
    """Raise ParamsError, with a remedy, if a profile does not pass the gates. A policy that never
    succeeds learns nothing, and truncated completions do not measure the policy."""
    samples, errors, solved = profile.select(
        pl.col("num_samples").sum(), pl.col("error").sum(), pl.col("correct").sum()
    ).row(0)
    cut_off = profile.select((pl.col("truncated_rate") * pl.col("num_samples")).sum()).item()
    solved_rate, cut_off_rate = solved / max(samples - errors, 1), cut_off / max(samples, 1)
    observed = (
        f"of {samples} samples {solved} are correct ({solved_rate:.1%}), and {cut_off_rate:.1%} "
        f"are cut off at sampling.max_tokens {max_tokens}"
    )
    ended = (profile["completion_tokens_max"] <= 1) & (profile["truncated_rate"] == 0)
    if cut_off_rate > max(gates.max_truncated_rate, 0.5):
        advice = "raise sampling.max_tokens, or make the policy write shorter completions"
    elif 2 * ended.sum() > len(profile):
        advice = ENDED
        logger.warning("%d of %d prompts get no text at all: %s", ended.sum(), len(profile), ENDED)
    else:
        advice = (
            "use easier prompts or a stronger policy, and check the extracted answers "
            "(data/profile/rollouts.parquet): the verifier may not find them"
        )
    if solved_rate < gates.min_solved_rate:
        broken = f"gates.min_solved_rate {gates.min_solved_rate:g} is not reached; to train "
        way_out = "lower it"
    elif cut_off_rate > gates.max_truncated_rate:
        broken = f"gates.max_truncated_rate {gates.max_truncated_rate:g} is passed; to train "
        way_out = "raise it"
    else:
        return
    raise params.ParamsError(
        f"the profile stops the run before training: {observed}. What to change: {advice}. "
        f"({broken}all the same, {way_out}.)"
    )


def log_plan(decisions: pl.DataFrame, expected: Mapping[str, Any]) -> None:
    """Log the decisions about the prompts, and the forecast of the plan."""
    counts = decisions.group_by("decision").len().sort("len", descending=True)
    for decision, count in counts.iter_rows():
        logger.info("%s: %d of %d prompts", decision, count, len(decisions))
    logger.info(
        "%(visits)d visits, %(rollouts)d rollouts, %(mixed_groups).0f mixed groups expected",
        expected["plan"],
    )
    if "judgement" in expected:
        logger.info("%s", judgement_words(expected["judgement"]))


def warn_if_few_learnable(profile: pl.DataFrame, mixed_rate: float) -> None:
    """Warn if under 5 % of the prompts were solved sometimes, but not always."""
    graded = pl.col("num_samples") - pl.col("error")
    is_learnable = (pl.col("correct") > 0) & (pl.col("correct") < graded)
    learnable = int(profile.select(is_learnable.sum()).item())
    if learnable >= 0.05 * len(profile):
        return
    logger.warning(
        "ONLY %d OF %d PROMPTS WERE SOLVED SOMETIMES BUT NOT ALWAYS: %.1f %% of the groups are "
        "expected to be mixed. All others have no gradient if the baseline is the group's mean. "
        "Use easier prompts, a stronger policy, or a larger sampling.max_tokens if completions are "
        "cut off",
        learnable,
        len(profile),
        100 * mixed_rate,
    )
