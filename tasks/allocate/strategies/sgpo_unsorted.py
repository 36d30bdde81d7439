"""`sgpo_unsorted`: sGPO without its order. A pass visits the same prompts with the same group
sizes, in random order.

The ablation "no curriculum". Kept unsolved prompts are still visited once per bucket, with that
bucket's group size."""

from functools import wraps
from typing import Any

import numpy as np
import polars as pl

from tasks.allocate.planning import Allocation
from tasks.allocate.strategies import sgpo

reads_profile = True


@wraps(sgpo.allocate)  # its settings are those of sGPO
def allocate(
    profile: pl.DataFrame, passes: int, rng: np.random.Generator, **settings: Any
) -> Allocation:
    sorted_ = sgpo.allocate(profile, passes, rng, **settings)
    every = pl.concat(sorted_.phases).partition_by("pass", maintain_order=True)
    return Allocation([visits[rng.permutation(len(visits))] for visits in every], sorted_.decisions)
