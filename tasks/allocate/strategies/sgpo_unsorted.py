"""`sgpo_unsorted`: sGPO without its order. A pass visits the same prompts with the same group
sizes, in random order.

The ablation "no curriculum". Kept unsolved prompts are still visited once per bucket, with that
bucket's group size."""

import numpy as np
import polars as pl

from tasks.allocate.planning import Allocation
from tasks.allocate.strategies import sgpo

reads_profile = True


def allocate(
    profile: pl.DataFrame,
    passes: int,
    rng: np.random.Generator,
    *,
    trivial_above: float,
    unsolved_rate: float,
    buckets: list[int],
) -> Allocation:
    sorted_ = sgpo.allocate(
        profile,
        passes,
        rng,
        trivial_above=trivial_above,
        unsolved_rate=unsolved_rate,
        buckets=buckets,
    )
    every = pl.concat(sorted_.phases).partition_by("pass", maintain_order=True)
    return Allocation([visits[rng.permutation(len(visits))] for visits in every], sorted_.decisions)
