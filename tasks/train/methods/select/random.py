"""`random`: some rollouts of each group, whatever their rewards: the control for `pods`."""

import numpy as np

from tasks.train.methods.subset import keep_in_groups
from tasks.train.rollouts import Bools, Floats, Ints


def select(rewards_B: Floats, group_B: Ints, rng: np.random.Generator, *, keep: int) -> Bools:
    """[B] whether a rollout is one of the `keep` of its group; a group of no more is kept whole."""
    return keep_in_groups(group_B, keep, lambda rows: rng.permutation(len(rows))[:keep])
