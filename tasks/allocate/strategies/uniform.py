"""`uniform`: every prompt, the same group size, and a new random order in each pass, as in plain
GRPO and DAPO."""

import numpy as np
import polars as pl

from tasks.allocate.planning import Allocation, decide, phase, shuffled

reads_profile = False


def allocate(
    profile: pl.DataFrame, passes: int, rng: np.random.Generator, *, group_size: int
) -> Allocation:
    rows = profile["row"]
    visits = [phase(number, shuffled(rows, rng), group_size) for number in range(passes)]
    return Allocation(
        visits, decide(profile, rows, "all", group_size, "uniform: every prompt alike")
    )
