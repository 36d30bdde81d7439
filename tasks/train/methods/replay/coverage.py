"""`coverage`: like `recent`, but keeps the mixed groups whose successes best represent those of all
mixed groups, stored and new (facility location, Nemhauser et al., 1978; our own buffer).

The likeness of two groups is the Jaccard index of the token n-grams in their correct rollouts.
Groups are chosen one by one, each time the one that most raises the sum, over all groups, of the
likeness to the nearest chosen one. This reaches at least 1 - 1/e of the largest sum. It compares
every pair of groups in every step, so `capacity` is small."""

from collections.abc import Sequence

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import OWN_TOKENS, Floats, Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.replay import recent
from tasks.train.methods.replay.recent import Settings as Recent
from tasks.train.methods.shape.repetition import turns

Grams = set[tuple[int, ...]]


@settings
class Settings(Recent):
    share: float = 0.5  # share of a batch
    capacity: int = 64  # maximum number of stored groups
    n: int = 4  # length of an n-gram in tokens

    def __post_init__(self) -> None:
        Recent.__post_init__(self)
        at_least(1, train__replay__n=self.n)


class Method(recent.Method):
    settings: Settings

    def kept(self, rollouts: Rollouts) -> Ints:
        num = len(rollouts.prompt_rows_Q)
        if num <= self.settings.capacity:
            return np.arange(num)
        alike = likeness(grams_of(rollouts, self.settings.n))
        return np.sort(greedy(alike, self.settings.capacity))


def grams_of(rollouts: Rollouts, n: int) -> list[Grams]:
    """Return the n-grams of each group's correct rollouts; a turn shorter than n is one n-gram."""
    found: list[Grams] = [set() for _ in rollouts.prompt_rows_Q]
    rows = rollouts.table.select("group", "token_ids", OWN_TOKENS.alias("own"))
    for group, ids, own in rows.filter(rollouts.is_correct_B()).rows():
        for run in turns(ids, own):
            found[group] |= {tuple(run[i : i + n]) for i in range(max(len(run) - n + 1, 1))}
    return found


def likeness(grams_Q: Sequence[Grams]) -> Floats:
    """Return [Q, Q] the Jaccard index of each pair of groups; 1 if neither has an n-gram."""
    alike = np.eye(len(grams_Q))
    for one, mine in enumerate(grams_Q):
        for other, theirs in enumerate(grams_Q[:one]):
            either = len(mine | theirs)
            alike[one, other] = alike[other, one] = len(mine & theirs) / either if either else 1.0
    return alike


def greedy(alike: Floats, size: int) -> Ints:
    """Return `size` groups in greedy order, by the gain in likeness; ties go to the first."""
    nearest, chosen = np.zeros(len(alike)), list[int]()
    for _ in range(size):
        gains = np.maximum(alike, nearest).sum(axis=1)
        gains[chosen] = -1.0
        chosen.append(int(np.argmax(gains)))
        nearest = np.maximum(nearest, alike[chosen[-1]])
    return np.array(chosen)
