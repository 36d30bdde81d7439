"""`mixed`: only groups with different rewards, as in DAPO's dynamic sampling (arXiv 2503.14476).

With `grpo` and most other advantages, groups of equal rewards have no gradient. With advantages
that need no group, such as `raw`, they do, and `mixed` drops it. Unlike with `all`, their update is
not charged, and with `train.divisor: kept` they are not in the loss's denominator.
"""

import numpy as np

from tasks.train.data.columns import Bools
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Select


class Method(Select):
    drops_equal = True

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        rewards_B, group_B = rollouts.rewards_B, rollouts.group_B
        return mixed_groups(rewards_B, group_B, len(rollouts.prompt_rows_Q))[group_B]
