"""`min_variance`: the reward minus the group's baseline with the smallest variance of the gradient
(VCPO, arXiv 2602.17616; rule from the authors' code).

b = sum w^2 g^2 R / sum w^2 g^2 over the group, with g the norm of the gradient of a rollout's
log-probability and w its importance weight. The norms cost a backward pass per rollout, which is
charged. Use with `loss: vcpo`."""

import numpy as np

from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.slots import Advantage


class Method(Advantage):
    features = Features(gradient_norms=True)

    def __call__(self, rollouts: Rollouts) -> Floats:
        observed, num = rollouts.observed, len(rollouts.group_B)
        if not num:
            return np.zeros(0)
        assert observed is not None
        assert observed.gradient_norms_B is not None
        gaps_N = (observed.logprobs_N - rollouts.logprobs_N) * rollouts.trained_N()
        log_weights_B = np.bincount(rollouts.owner_N(), gaps_N, num)
        largest_Q = np.full(int(rollouts.group_B.max()) + 1, -np.inf)
        np.maximum.at(largest_Q, rollouts.group_B, log_weights_B)
        weights_B = np.exp(log_weights_B - largest_Q[rollouts.group_B]) * observed.gradient_norms_B
        return advantage(rollouts.rewards_B, rollouts.group_B, weights_B)


def advantage(rewards_B: Floats, group_B: Ints, weights_B: Floats) -> Floats:
    """Return [B] rewards minus their group's weighted mean; the weights are the squares of
    `weights_B`, whose scale does not matter; exactly 0 in a group with equal rewards."""
    squares_B = weights_B**2
    total_Q = np.maximum(np.bincount(group_B, squares_B), 1e-300)
    baseline_Q = np.bincount(group_B, squares_B * rewards_B) / total_Q
    mixed_Q = mixed_groups(rewards_B, group_B, len(total_Q))
    return np.where(mixed_Q[group_B], rewards_B - baseline_Q[group_B], 0.0)
