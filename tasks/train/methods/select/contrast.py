"""`contrast`: the shortest correct and the longest wrong rollouts, `keep` of each group."""

import numpy as np

from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.select.keep import EXAMPLE, KeepInGroups, Settings

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(KeepInGroups):
    def choose(self, rollouts: Rollouts, rows: Ints, rng: np.random.Generator) -> Ints:
        """Return the indices of `keep` rollouts, half of each outcome if both have enough."""
        is_correct, lengths = rollouts.is_correct_B()[rows], rollouts.completion_tokens_B()[rows]
        order = np.argsort(np.where(is_correct, lengths, -lengths), kind="stable")
        correct, wrong = (order[is_correct[order] == kind] for kind in (True, False))
        keep = self.settings.keep
        num = max(min(keep // 2, len(correct)), keep - len(wrong))
        return np.concatenate([correct[:num], wrong[: keep - num]])
