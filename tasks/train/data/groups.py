"""Statistics of the rewards of groups.

Legend: B rollouts, Q groups; `group_B` is the group index of each rollout."""

import numpy as np

from tasks.train.data.columns import Bools, Floats, Ints

ROUNDING = 1e-9  # relative to the larger reward; rewards that differ by less count as equal


def group_means(values_B: Floats, group_B: Ints) -> tuple[Floats, Ints]:
    """Return [Q] the mean of each group (0 for one without rows) and its size; Q is the largest
    group index plus one."""
    size_Q = np.bincount(group_B)
    return np.bincount(group_B, values_B) / np.maximum(size_Q, 1), size_Q


def extremes(values_B: Floats, group_B: Ints, num_groups: int) -> tuple[Floats, Floats]:
    """Return [Q] the least and [Q] the largest value of each group; infinite without rows."""
    least_Q, most_Q = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(least_Q, group_B, values_B)
    np.maximum.at(most_Q, group_B, values_B)
    return least_Q, most_Q


def mixed_groups(rewards_B: Floats, group_B: Ints, num_groups: int) -> Bools:
    """Return [Q] whether a group has two different rewards. Rewards that differ only by rounding
    are equal: a composite of 0.1 and 0.2 is not exactly 0.3. The tolerance is relative, so that
    small rewards may differ."""
    low, high = extremes(rewards_B, group_B, num_groups)
    has_rows = high >= low
    scale = np.maximum(np.abs(low), np.abs(high), out=np.zeros(num_groups), where=has_rows)
    spread = np.subtract(high, low, out=np.zeros(num_groups), where=has_rows)
    return np.asarray(spread > ROUNDING * scale)


def centred_rewards(rewards_B: Floats, group_B: Ints) -> Floats:
    """Return [B] rewards minus their group's mean; exactly 0 in a group with equal rewards,
    including a group of one."""
    mean_Q, _ = group_means(rewards_B, group_B)
    mixed_Q = mixed_groups(rewards_B, group_B, len(mean_Q))
    return np.where(mixed_Q[group_B], rewards_B - mean_Q[group_B], 0.0)
