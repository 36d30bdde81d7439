"""`failures`: groups of only failures get a gradient from one virtual success (NGRPO, arXiv
2509.18851).

With a virtual success in the mean and the standard deviation, each of G wrong rollouts has the
advantage -1 / sqrt(G), in `grpo`'s units. Groups with a correct rollout are unchanged. A `select`
that drops groups of equal rewards is refused."""

import numpy as np

from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


class Method(Shape):
    needs_equal = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        group_B, (size_Q, correct_Q) = rollouts.group_B, rollouts.graded_Q()
        failed_B = correct_Q[group_B] == 0
        of_failed_B = -1.0 / np.sqrt(size_Q[group_B])
        owner_N = rollouts.owner_N()
        return np.where(failed_B[owner_N], of_failed_B[owner_N], advantages_N)
