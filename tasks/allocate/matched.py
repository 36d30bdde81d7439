"""Uniform plans with the expected cost of sGPO's plan, its profile included.

A comparison at equal cost needs a baseline of that cost. Cost is counted in tokens of training: a
profiled token is a forward (2 P), a trained one is generated and updated (8 P, no reference
policy), so four profiled tokens cost as much as one trained token."""

import numpy as np
import polars as pl

from tasks.allocate.plan import phase, shuffled
from tasks.allocate.strategies import sgpo
from tasks.common.params import at_least

PROFILED_PER_TRAINED = 4.0  # profiled tokens that cost as much as one trained token


def tokens_per_rollout(profile: pl.DataFrame) -> pl.DataFrame:
    """Return prompt_id and the expected `tokens` of one of its rollouts, prompt and completion."""
    completion = pl.col("completion_tokens") / pl.col("num_samples")
    return profile.select("prompt_id", tokens=pl.col("prompt_tokens") + completion)


def expected_tokens(visits: pl.DataFrame, profile: pl.DataFrame) -> float:
    """Return the expected tokens of visits (prompt_id, group_size)."""
    rows = visits.join(tokens_per_rollout(profile), on="prompt_id", how="left")
    return float(rows.select((pl.col("group_size") * pl.col("tokens")).sum()).item() or 0.0)


def sgpo_plan(
    profile: pl.DataFrame, passes: int, rng: np.random.Generator, settings: dict[str, object]
) -> tuple[pl.DataFrame, float]:
    """Return sGPO's visits under its `settings`, and the cost of them and the profile in tokens of
    training."""
    visits = pl.concat(sgpo.allocate(profile, passes, rng, **settings).phases)  # type: ignore[arg-type]
    profiled = profile.select(
        (pl.col("num_samples").cast(pl.Int64) * pl.col("prompt_tokens")).sum()
    ).item()
    profiled += profile["completion_tokens"].sum()
    return visits, expected_tokens(visits, profile) + profiled / PROFILED_PER_TRAINED


def uniform_until(
    prompt_ids: pl.Series,
    group_size: int,
    budget: float,
    profile: pl.DataFrame,
    rng: np.random.Generator,
) -> list[pl.DataFrame]:
    """Return passes over `prompt_ids` in random orders, each with `group_size`; the last one is cut
    where `budget` is spent."""
    at_least(1, allocate__group_size=group_size)  # empty groups would never spend the budget
    tokens = dict(tokens_per_rollout(profile).iter_rows())
    passes: list[pl.DataFrame] = []
    while budget > 0 and len(prompt_ids):
        visits = phase(len(passes), shuffled(prompt_ids, rng), group_size)
        spent = np.cumsum([group_size * tokens[prompt_id] for prompt_id in visits["prompt_id"]])
        passes.append(visits.head(int(np.searchsorted(spent, budget, side="right"))))
        budget = budget - float(spent[-1]) if len(passes[-1]) == len(visits) else 0.0
    return passes
