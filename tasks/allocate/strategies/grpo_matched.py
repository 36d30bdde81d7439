"""`grpo_matched`: all prompts, with one group size, until the run has cost as much as sGPO's plan
and profile.

The baseline at equal charged compute. `allocate.passes` applies to sGPO's plan; here the number of
passes follows from the budget. No profile is charged, because uniform training needs none."""

import numpy as np
import polars as pl

from tasks.allocate.matched import sgpo_plan, uniform_until
from tasks.allocate.planning import Allocation, decide

reads_profile = False


def allocate(
    profile: pl.DataFrame,
    passes: int,
    rng: np.random.Generator,
    *,
    group_size: int,
    trivial_above: float,
    unsolved_rate: float,
    buckets: list[int],
) -> Allocation:
    """Return uniform visits that cost as much as the profile and sGPO's plan under the last three
    settings."""
    settings = {"trivial_above": trivial_above, "unsolved_rate": unsolved_rate, "buckets": buckets}
    _, budget = sgpo_plan(profile, passes, rng, settings)
    rows = profile["row"]
    visits = uniform_until(rows, group_size, budget, profile, rng)
    return Allocation(
        visits, decide(profile, rows, "all", group_size, "uniform, until sGPO's cost is spent")
    )
