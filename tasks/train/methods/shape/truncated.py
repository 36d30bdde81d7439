"""`truncated`: do not train on completions that were cut at the token limit (over-long filtering,
arXiv 2503.14476). They still count in their group's mean."""

import numpy as np

from tasks.train.rollouts import Floats, Rollouts
from tasks.train.slots import Shape


class Method(Shape):
    masks = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        is_cut_B = (rollouts.table["reason"] == "length").to_numpy()
        return np.where(is_cut_B[rollouts.owner_N()], 0.0, advantages_N)
