"""`band`: prompts that were solved sometimes, but not too often, all with the same group size, in
random order."""

import numpy as np
import polars as pl

from tasks.allocate.planning import Allocation, decide, phase, shuffled

reads_profile = True


def allocate(
    profile: pl.DataFrame,
    passes: int,
    rng: np.random.Generator,
    *,
    trivial_above: float,
    group_size: int,
) -> Allocation:
    rate = pl.col("pass_rate")
    chosen = profile.filter((rate > 0) & (rate <= trivial_above))["row"]
    trivial = profile.filter(rate > trivial_above)["row"]
    unsolved = profile.filter(rate == 0)["row"]
    ungraded = profile.filter(rate.is_null())["row"]
    visits = [phase(number, shuffled(chosen, rng), group_size) for number in range(passes)]
    decided = [
        (chosen, "learnable", group_size, f"in the band: groups of {group_size}"),
        (trivial, "trivial", 0, f"solved more often than {trivial_above:.0%}: dropped"),
        (unsolved, "unsolved_dropped", 0, "never solved: dropped"),
        (ungraded, "ungraded", 0, "no valid grade"),
    ]
    return Allocation(visits, pl.concat([decide(profile, *each) for each in decided]))
