"""Advantages from rewards: a step's slots `select`, `shape` and `advantage`."""

import numpy as np

from tasks.train.data.rollouts import Rollouts
from tasks.train.learner.correction import far_tokens
from tasks.train.settings import TrainSettings
from tasks.train.slots import Slots


def estimate(
    rollouts: Rollouts,
    slots: Slots,
    settings: TrainSettings,
    max_tokens: int,
    rng: np.random.Generator,
) -> Rollouts:
    """Return the rollouts with their advantages and selection (see `Rollouts.estimated`)."""
    graded_B = ~rollouts.is_error_B()  # failed gradings count in no group and no divisor
    keep_B = graded_B.copy()
    keep_B[graded_B] = slots.select(rollouts.where(graded_B), rng)
    over_B = keep_B if settings.advantage_over == "kept" else graded_B
    over = rollouts.where(over_B)
    for shape in slots.shape:
        over = over.with_columns(reward=shape.rewards(over, max_tokens))
    advantages = slots.advantage(over)
    # per rollout or per token
    if len(advantages) == len(over.group_B):
        advantages = advantages[over.owner_N()]
    if slots.drops_cut:
        advantages = advantages[~over.is_cut_B()[over.owner_N()]]
        over = over.where(~over.is_cut_B())
        keep_B, over_B = keep_B & ~rollouts.is_cut_B(), over_B & ~rollouts.is_cut_B()
    for shape in slots.shape:
        advantages = shape.advantages(over, advantages, rng)
    owner_N = rollouts.owner_N()
    advantages_N = np.zeros(len(owner_N))
    advantages_N[over_B[owner_N]] = advantages
    learned_N = keep_B[owner_N] & rollouts.trained_N()
    limit = settings.correction.m2po
    if limit is not None and rollouts.observed is not None:
        learned_N &= advantages_N != 0.0  # others are not trained on, so the limit omits them
        ratios_N = rollouts.observed.logprobs_N - rollouts.logprobs_N
        learned_N[learned_N] = ~far_tokens(ratios_N[learned_N], limit)
    rollouts = rollouts.estimated(keep_B, np.where(learned_N, advantages_N, 0.0))
    skips = [shape.skips_zeros for shape in slots.shape]
    if slots.advantage.skips_zeros or any(skips):
        return rollouts.with_columns(kept=keep_B & rollouts.has_advantage_B())
    return rollouts
