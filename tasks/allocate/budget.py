"""How recipes spend `experiment.budget`: first on their profile and warm start, then on rollouts.
Also: the smallest difference that the test prompts resolve."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tasks.allocate.forecast import kept_shares, num_demonstrations
from tasks.allocate.planning import load_strategy, make_plan
from tasks.allocate.settings import AllocateSettings
from tasks.allocate.visits import Compared, compare
from tasks.common import recipes, registry
from tasks.common.accounting.ledger import Architecture
from tasks.common.accounting.spending import (
    LENGTHS,
    Rows,
    generation_cost,
    pass_cost,
    prompt_cost,
    rows_in,
)
from tasks.common.artifacts import PROFILE, ROLLOUTS
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.params import Budget, Experiment, ParamsError, section
from tasks.common.statistics import POINT, half_width, mixed_probability, score_prompts
from tasks.train.needs import (
    declared,
    has_bonus,
    num_scorings,
    num_stored,
    profile_readers,
    read_train,
    reference_parameters,
)
from tasks.train.settings import TrainSettings

Values = Mapping[str, Any]
STRATEGIES = Path(__file__).parent / "strategies"


def budget_of(values: Values) -> Budget | None:
    """Return `experiment.budget`, or None if it is null."""
    return section(values, "experiment", Experiment).budget


def is_profile_charged(recipe: Values) -> bool:
    """Return whether the recipe's strategy, slots or warm start read the profile."""
    strategy = STRATEGIES / f"{recipe['allocate']['strategy']}.py"
    readers = profile_readers(read_train(recipe["train"]))
    return bool(registry.declared(strategy, "reads_profile") or readers)


def profile_cost(layout: Layout, account: str, architecture: Architecture) -> float:
    """Return the cost of sampling the profile, in the unit of the account."""
    rows = ROLLOUTS.read_columns(layout.profile / "rollouts.parquet", list(LENGTHS))
    return generation_cost(account, architecture, rows_in(rows))


def require_rest(
    budget: Budget, recipe: str, profile: float, warm: float, verb: str = "took"
) -> None:
    """Raise ParamsError if the profile and the warm start cost at least the budget."""
    if profile + warm >= budget.amount:
        costs, remedies = [], []
        if profile:
            costs.append(f"the profile, which recipe '{recipe}' reads, {verb} {profile:.3g} of it")
            remedies.append("profile.num_samples")
        if warm:
            costs.append(f"the warm start of recipe '{recipe}' takes about {warm:.3g}")
            remedies.append("train.warm_start.steps")
        raise ParamsError(
            f"experiment.budget is {budget.amount:.3g} of {budget.account}, and "
            f"{' and '.join(costs)}: raise the amount, lower {' or '.join(remedies)}, or leave the "
            "recipe out"
        )


def read_profile(layout: Layout) -> pl.DataFrame:
    """Read the PROFILE table into one chunk, which makes gathering rows ten times as fast."""
    return PROFILE.read(layout.profile / "profile.parquet").rechunk()


def compared_plan(values: Values, profile: pl.DataFrame, name: str) -> Compared:
    """Return the plan that `allocate` would write for the recipe `name` and the first seed, beside
    a uniform plan for comparison."""
    settings = section(values, "allocate", AllocateSettings)
    _, allocate = load_strategy(recipes.recipe(values, name)["allocate"])
    rng = np.random.default_rng([settings.seed, values["experiment"]["seeds"][0]])
    return compare(make_plan(allocate(profile, settings.passes, rng).phases, profile), profile)


@dataclass(frozen=True)
class Planned:
    """The expectation for a plan: its number of rollouts, the mean group size, the mean tokens of a
    rollout's prompt and completion, and the shares of rollouts in the loss (`kept`) and with a
    gradient (`mixed`). For example Planned(32_768, 8, 20, 13, 1.0, 0.6)."""

    rollouts: float
    group_size: float
    prompt: float
    completion: float
    kept: float
    mixed: float


def planned(compared: Compared, train: TrainSettings) -> Planned:
    """Return a plan's expected rollouts, lengths and shares; `train` is the recipe's section."""
    counted, lengths = compared.plan.counted, compared.profile["prompt_tokens"].to_numpy()
    correct, graded, sizes, visits, tokens = (
        counted[name].to_numpy() for name in ("correct", "graded", "group_size", "visits", "tokens")
    )
    mixed = mixed_probability(correct, graded, sizes, compared.prior)
    kept, in_mixed = kept_shares(sizes, mixed, train.select)
    rollouts = visits * sizes
    length, kept_mean, mixed_mean = (
        float(np.average(values, weights=rollouts)) for values in (tokens, kept, in_mixed)
    )
    prompt = float(np.average(lengths[compared.plan.rows], weights=compared.plan.sizes))
    size = float(rollouts.sum() / visits.sum())
    return Planned(
        float(rollouts.sum()), size, prompt, max(length - prompt, 0.0), kept_mean, mixed_mean
    )


def reference_forwards(architecture: Architecture, train: TrainSettings) -> float:
    """Return the cost of the reference's forward pass relative to the policy's; 0 without a
    reference. All parameters of a teacher count as matmul parameters."""
    own = architecture.num_matmul_parameters
    return reference_parameters(train, own) / own


def rollout_cost(
    account: str, architecture: Architecture, plan: Planned, train: TrainSettings
) -> float:
    """Return the cost, in the account, of generating and training on one rollout of the plan.
    Updates on rollouts without a gradient (there are none with a reference or entropy bonus) count
    only in `charged`. Not included: adapters' cheaper updates, replay, and features of slots."""
    updates, reference = train.updates, reference_forwards(architecture, train)
    is_all = account == "charged" or reference > 0.0 or has_bonus(train)
    updated = plan.kept if is_all else plan.mixed
    num_passes: float = updated * (3.0 * updates.epochs + reference)
    num_passes += num_scorings(train) + num_stored(train) / plan.group_size
    size = max(round(plan.group_size), 1)
    rows = group(size, plan.prompt, plan.completion)
    generated = generation_cost(account, architecture, rows)
    passes, saved = num_passes * pass_cost(account, architecture, rows), 0.0
    if not train.prompt_gradient:
        saved = updated * 2.0 * updates.epochs * prompt_cost(account, architecture, rows)
    return (generated + passes - saved) / size


def warm_start_cost(
    account: str, architecture: Architecture, prompt: float, completion: float, train: TrainSettings
) -> float:
    """Return the cost of the recipe's warm start in the account, for prompts and completions of
    these lengths in tokens."""
    rows = group(1, prompt, completion)
    cost, saved = 3.0 * pass_cost(account, architecture, rows), 0.0
    if not train.prompt_gradient:
        saved = 2.0 * prompt_cost(account, architecture, rows)
    return num_demonstrations(train) * (cost - saved)


def rollouts_of(
    budget: Budget | None,
    architecture: Architecture,
    plan: Planned,
    train: TrainSettings,
    profile: float,
) -> float:
    """Return the number of rollouts of a run, limited by `train.max_steps`: all that the budget
    buys after the warm start and the cost `profile`; without a budget, the whole plan."""
    rollouts = plan.rollouts
    if budget is not None:
        lengths = plan.prompt, plan.completion
        warm = warm_start_cost(budget.account, architecture, *lengths, train)
        left = max(budget.amount - profile - warm, 0.0)
        rollouts = left / rollout_cost(budget.account, architecture, plan, train)
    if train.max_steps is not None:
        rollouts = min(rollouts, train.max_steps * step_size(plan, train))
    return rollouts


def step_size(plan: Planned, train: TrainSettings) -> float:
    """Return the number of rollouts that a step samples after the profile's were replayed."""
    batch, size, replay = train.batch, plan.group_size, train.replay
    is_fresh = declared("replay", replay, "reads_profile") or replay.get("folders") == []
    share = 0.0 if is_fresh else replay.get("share", 0.0)
    fresh = max(batch.size - int(share * batch.size), 1)
    if batch.unit == "prompts":
        return float(fresh * size)
    counted = train.select.get("keep", size) if batch.counts == "kept" else size
    return float(max(fresh * max(size / counted, 1.0), size))  # at least one group


def group(size: int, prompt: float, completion: float) -> Rows:
    """Return the rows of one group: `size` rollouts of these lengths in tokens, rounded."""
    lengths = (np.full(size, round(length)) for length in (prompt, completion))
    return Rows(np.zeros(size, dtype=np.int64), *lengths)


def resolution(values: Values, layout: Layout) -> str:
    """Return a sentence on the smallest difference in pass@1 that the test prompts resolve, or an
    empty string if their number is 0 or unknown. It uses the baseline's pass rates, if any."""
    num_samples, num_prompts = values["evaluate"]["num_samples"], values["ingest"]["splits"]["test"]
    counts: tuple[pl.Series, pl.Series] | None = None
    with suppress(ArtifactError):
        path = layout.baseline / "rollouts.parquet"
        scores = score_prompts(ROLLOUTS.read_columns(path, ["prompt_id", "outcome", "greedy"]))
        counts, num_prompts = (scores["correct"], scores["trials"]), num_prompts or len(scores)
    if not num_prompts:
        return ""
    half = half_width(num_prompts, num_samples, counts)
    source = "if both have the baseline's pass rates"
    if counts is None or half == 0.0:  # every prompt was solved always or never
        half = half_width(num_prompts, num_samples)
        source = "at worst, if every pass rate is one half"
    needed = math.ceil(num_prompts * (half / POINT) ** 2)  # the width falls with their root
    return (
        f"{num_prompts:,} test prompts with {num_samples} samples resolve {100 * half:.1f} points "
        f"between two policies, {source}; about {needed:,} prompts "
        "would resolve one point"
    )
