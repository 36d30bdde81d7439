"""Uniform plans with the same expected cost as sGPO's plan and profile together.

A comparison at equal cost needs a baseline at the same cost. Cost is counted in trained tokens. A
profiled token costs a forward pass (2 FLOPs per parameter), and a trained token its generation and
update (8 without a reference policy), so four profiled tokens cost as much as one trained token."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.allocate.forecast import profiled_tokens
from tasks.allocate.planning import phase, shuffled
from tasks.allocate.strategies import sgpo
from tasks.allocate.visits import prompts_of

Floats = npt.NDArray[np.float64]

PROFILED_PER_TRAINED = 4.0  # profiled tokens that cost as much as one trained token


def expected_tokens(visits: pl.DataFrame, profile: pl.DataFrame) -> Floats:
    """Return the expected tokens of each visit (row, group_size), shape [num_visits]."""
    tokens = prompts_of(profile)["tokens"].to_numpy()[visits["row"].to_numpy()]
    return np.asarray(visits["group_size"].to_numpy() * tokens)


def sgpo_plan(
    profile: pl.DataFrame, passes: int, rng: np.random.Generator, settings: dict[str, object]
) -> tuple[pl.DataFrame, float]:
    """Return sGPO's visits under its `settings`, and the cost of these visits and the profile in
    trained tokens."""
    visits = pl.concat(sgpo.allocate(profile, passes, rng, **settings).phases)  # type: ignore[arg-type]
    profiled = int(profile.select(profiled_tokens().sum()).item())
    spent = float(expected_tokens(visits, profile).sum())
    return visits, spent + profiled / PROFILED_PER_TRAINED


def uniform_until(
    rows: pl.Series,
    group_size: int,
    budget: float,
    profile: pl.DataFrame,
    rng: np.random.Generator,
) -> list[pl.DataFrame]:
    """Return passes over the prompts in `rows`, each in a new random order, with groups of
    `group_size`. The last pass ends where `budget`, in trained tokens, is spent."""
    passes: list[pl.DataFrame] = []
    while budget > 0 and len(rows):
        visits = phase(len(passes), shuffled(rows, rng), group_size)
        spent = np.cumsum(expected_tokens(visits, profile))
        passes.append(visits.head(int(np.searchsorted(spent, budget, side="right"))))
        budget = budget - float(spent[-1]) if len(passes[-1]) == len(visits) else 0.0
    return passes
