"""`random_subset`: as many random prompts as sGPO trains on, with one group size, at the same cost
as sGPO's plan and profile.

If sGPO beats this baseline, the gain comes from its choice of prompts, group sizes and order, not
from training on fewer prompts. Like `grpo_matched`, this baseline trains instead of profiling."""

from functools import wraps
from typing import Any

import numpy as np
import polars as pl

from tasks.allocate.matched import sgpo_plan, uniform_until
from tasks.allocate.planning import Allocation, decide
from tasks.allocate.strategies import grpo_matched

reads_profile = False


@wraps(grpo_matched.allocate)  # its settings are those of `grpo_matched`
def allocate(
    profile: pl.DataFrame, passes: int, rng: np.random.Generator, group_size: int, **settings: Any
) -> Allocation:
    visits, budget = sgpo_plan(profile, passes, rng, settings)
    order, num = rng.permutation(len(profile)), visits["row"].n_unique()
    chosen, others = (profile["row"].gather(np.sort(part)) for part in (order[:num], order[num:]))
    decisions = pl.concat(
        [
            decide(profile, chosen, "subset", group_size, "in the random subset"),
            decide(profile, others, "subset_dropped", 0, "not in the random subset"),
        ]
    )
    return Allocation(uniform_until(chosen, group_size, budget, profile, rng), decisions)
