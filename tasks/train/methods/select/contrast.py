"""`contrast`: of each group the shortest correct and the longest wrong rollouts, `keep` in all."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, Settings, keep_in_groups
from tasks.train.rollouts import Bools, Ints, Rollouts
from tasks.train.slots import Select

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Select):
    settings: Settings

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether a rollout is kept: half of each kind, or all of the rarer kind and the
        rest of the other."""
        is_correct_B, lengths_B = rollouts.is_correct_B(), rollouts.completion_tokens_B()
        rank_B = np.where(is_correct_B, lengths_B, -lengths_B)

        def extremes(rows: Ints) -> Ints:
            order = np.argsort(rank_B[rows], kind="stable")
            correct, wrong = (order[is_correct_B[rows[order]] == kind] for kind in (True, False))
            num = max(min(self.settings.keep // 2, len(correct)), self.settings.keep - len(wrong))
            return np.concatenate([correct[:num], wrong[: self.settings.keep - num]])

        return keep_in_groups(rollouts.group_B, self.settings.keep, extremes)
