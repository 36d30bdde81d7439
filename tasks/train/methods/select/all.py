"""`all`: every rollout enters the loss."""

import numpy as np

from tasks.train.rollouts import Bools, Floats, Ints


def select(rewards_B: Floats, group_B: Ints, rng: np.random.Generator) -> Bools:
    """[B] True."""
    return np.ones(len(rewards_B), dtype=np.bool_)
