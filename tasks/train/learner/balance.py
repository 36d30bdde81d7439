"""The distribution of a step's rollouts over the ranks, so that all compute about the same number
of tokens.

A rank prefills the prompt of each of its groups once. Groups stay whole if no rank then has more
than 1.05 times the mean load. Otherwise they are split, although every further rank prefills the
prompt again. The capacity of a rank is then the smallest that fits all rollouts, to within half a
percent of the mean. Groups are placed largest first, each on the rank with the fewest tokens, its
longest rollout first. Rollouts beyond the capacity go to the rank that then has the fewest tokens.

Legend: B rollouts.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts

SLACK = 1.05  # groups stay whole up to this ratio of a rank's tokens to the mean
PRECISION = 0.005  # of the search for the capacity, as a share of the mean


@dataclass(frozen=True)
class Group:
    """Rollouts that share the prefill of `prompt` tokens: their `rows`, the longest first, and
    their `lengths`, each rollout's number of tokens outside the shared prompt."""

    prompt: int
    rows: Ints
    lengths: Ints

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute on one rank."""
        return self.prompt + int(self.lengths.sum())


def rank_of(rollouts: Rollouts, rows: Ints, num_ranks: int, *, shares: bool) -> Ints:
    """Return the rank of each rollout in `rows`. With `shares` the rollouts of a group share the
    prefill of their prompt."""
    groups = sorted(pieces(rollouts, rows, shares=shares), key=lambda group: -group.num_tokens)
    mean = sum(group.num_tokens for group in groups) / num_ranks
    ranks = place(groups, SLACK * mean, num_ranks, whole=True)
    if ranks is None:
        ranks = split(groups, mean, num_ranks)
    return np.array([ranks[row] for row in rows.tolist()], dtype=np.int64)


def split(groups: list[Group], mean: float, num_ranks: int) -> dict[int, int]:
    """Return each row's rank, with groups split at the smallest capacity per rank that fits all."""
    low = max(mean, max(group.prompt + int(group.lengths[0]) for group in groups))
    high = low
    while (fitting := place(groups, high, num_ranks)) is None:
        low, high = high, 2.0 * high
    while high - low > PRECISION * mean:
        middle = (low + high) / 2.0
        placed = place(groups, middle, num_ranks)
        if placed is None:
            low = middle
        else:
            fitting, high = placed, middle
    return fitting


def pieces(rollouts: Rollouts, rows: Ints, *, shares: bool) -> list[Group]:
    """Return the rollouts in `rows`, grouped by shared prompt; without `shares`, each alone."""
    prompts_B, tokens_B = rollouts.prompt_tokens_B(), rollouts.tokens_B()
    if not shares:
        return [Group(0, np.array([row]), tokens_B[[row]]) for row in rows]
    by_group = rows[np.lexsort((-tokens_B[rows], rollouts.group_B[rows]))]
    _, firsts = np.unique(rollouts.group_B[by_group], return_index=True)
    parts = [(int(prompts_B[part[0]]), part) for part in np.split(by_group, firsts[1:])]
    return [Group(prompt, part, tokens_B[part] - prompt) for prompt, part in parts]


def place(
    groups: list[Group], capacity: float, num_ranks: int, *, whole: bool = False
) -> dict[int, int] | None:
    """Return each row's rank, so that no rank has more than `capacity` tokens and, with `whole`, no
    group is split; None if that fails when groups are placed in this order."""
    ranks = [(0.0, rank) for rank in range(num_ranks)]  # the number of tokens, and the rank
    rank_of_row: dict[int, int] = {}
    for group in groups:
        waiting = [*zip(group.rows.tolist(), group.lengths.tolist(), strict=True)]
        while waiting:
            used, rank = heapq.heappop(ranks)
            used += group.prompt
            left = []
            for row, length in waiting:
                if used + length > capacity:
                    left.append((row, length))
                    continue
                used += length
                rank_of_row[row] = rank
            if len(left) == len(waiting) or (left and whole):
                return None
            heapq.heappush(ranks, (used, rank))
            waiting = left
    return rank_of_row
