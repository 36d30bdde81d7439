"""`mixed`: only groups with different rewards, as DAPO's dynamic sampling leaves them (arXiv
2503.14476).

Groups without a gradient have none with `all` either; here they also leave the loss's denominator,
and are not charged as updated."""

import numpy as np

from tasks.train.rollouts import Bools, Floats, Ints, mixed_groups


def select(rewards_B: Floats, group_B: Ints, rng: np.random.Generator) -> Bools:
    """[B] whether a rollout's group has two different rewards."""
    return mixed_groups(rewards_B, group_B, int(group_B.max(initial=-1)) + 1)[group_B]
