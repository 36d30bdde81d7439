"""`all`: every rollout enters the loss."""

import numpy as np

from tasks.train.data.columns import Bools
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Select


class Method(Select):
    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        return np.ones(len(rollouts.rewards_B), dtype=np.bool_)
