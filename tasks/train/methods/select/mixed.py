"""`mixed`: only groups with different rewards, as in DAPO's dynamic sampling (arXiv 2503.14476).

Groups of equal rewards never have a gradient. Unlike with `all`, their update is not charged, and
with `train.divisor: kept` they are not in the loss's denominator.
"""

import numpy as np

from tasks.train.rollouts import Bools, Rollouts, mixed_groups
from tasks.train.slots import Select


class Method(Select):
    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether a rollout's group has two different rewards."""
        rewards_B, group_B = rollouts.rewards_B, rollouts.group_B
        return mixed_groups(rewards_B, group_B, len(rollouts.prompt_rows_Q))[group_B]
