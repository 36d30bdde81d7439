"""`cppo`: the rollouts of a group with the largest mean |advantage| are trained on; the others are
dropped (CPPO, arXiv 2503.22342). It is the biased counterpart of `pruned_po`.

Of a group of G rollouts, floor(G (1 - drop)) stay, at least one, with unchanged advantages and
divisors; ties go to the first. As in the paper the rule is per group; the authors' code takes the
largest of the whole batch. Left out: a larger batch of prompts, so that updates keep their size
(`train.batch.size` sets it)."""

import numpy as np

from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.shape.pruned_po import Settings
from tasks.train.slots import Shape


class Method(Shape):
    settings: Settings
    skips_zeros = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        group_B, size_Q = rollouts.group_B, rollouts.sizes_Q()
        order = np.lexsort((-rollouts.own_means_B(np.abs(advantages_N)), group_B))
        rank_B = np.empty(len(order), dtype=np.int64)
        rank_B[order] = np.arange(len(order)) - (np.cumsum(size_Q) - size_Q)[group_B[order]]
        num_Q = np.maximum(np.floor(size_Q * (1.0 - self.settings.drop) + ROUNDING), 1)
        return np.where((rank_B < num_Q[group_B])[rollouts.owner_N()], advantages_N, 0.0)
