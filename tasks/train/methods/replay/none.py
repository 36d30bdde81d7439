"""`none`: strictly on-policy, nothing is stored."""

import numpy as np

from tasks.train.rollouts import Rollouts
from tasks.train.settings import BatchSettings
from tasks.train.slots import Replay


class Method(Replay):
    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        """Return None: there is nothing to train on again."""
        return None
