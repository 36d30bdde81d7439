"""`one_sided`: train only on the rollouts with the rarer outcome of a group, and skip the others.

With a baseline of 0 or 1 the advantage `r - b` of one outcome is exactly 0, and REINFORCE stays
unbiased for any baseline that does not depend on the rollout itself. The baseline is the majority
outcome of the group: a hard prompt is trained on its correct rollouts, an easy one on its wrong
rollouts. But the majority depends on the rollout itself, so the prompt's expected gradient shrinks,
though it keeps its direction. Without the gate below it shrinks by the factor 1 - P(Bin(G - 1, p)
is one short of a majority): .727 with G = 8 and p = .5. With the gate at c = 3, balanced groups are
two-sided, and the factor is .766.

One-sided groups have a higher variance than two-sided ones, especially if they are balanced. So if
the rarer outcome has a share of at least m* = c / (1 + 2 c), all rollouts of the group are trained
on, with RLOO's advantages. c, `update_cost`, is the cost of training on a rollout relative to
generating it (3 in FLOPs). QAE has the same gate (arXiv 2509.22611), but divides by the standard
deviation and trains on all rollouts.

Rewards are split at the midpoint of the group's extremes, which separates correct from wrong if
there are only two values. `posterior` takes the side from a posterior that excludes the group.
"""

import numpy as np

from tasks.common.params import ParamsError, settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import extremes, mixed_groups
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.advantage import rloo
from tasks.train.slots import Advantage


def evenest_share(update_cost: float) -> float:
    """Return the rarer outcome's minimum share for training on both outcomes: c / (1 + 2 c)."""
    if not update_cost >= 0:
        raise ParamsError(
            f"train.advantage.update_cost is {update_cost}; it is the cost of updating a rollout "
            "over that of generating it: 0 or more, 3 in FLOPs"
        )
    return 0.5 if np.isinf(update_cost) else update_cost / (1.0 + 2.0 * update_cost)


@settings
class Settings:
    update_cost: float = 3.0  # cost of updating / generating a rollout; 3 in FLOPs

    def __post_init__(self) -> None:
        evenest_share(self.update_cost)


class Method(Advantage):
    skips_zeros = True

    def __init__(self, settings: Settings) -> None:
        self.evenest = evenest_share(settings.update_cost)

    def __call__(self, rollouts: Rollouts) -> Floats:
        rewards_B, group_B = rollouts.rewards_B, rollouts.group_B
        num_groups = len(rollouts.prompt_rows_Q)
        low_Q, high_Q = extremes(rewards_B, group_B, num_groups)
        is_high_B = rewards_B > (low_Q[group_B] + high_Q[group_B]) / 2.0
        size_Q = np.maximum(np.bincount(group_B, minlength=num_groups), 1)
        share_Q = np.bincount(group_B, is_high_B, minlength=num_groups) / size_Q
        # a tie is two-sided if that is allowed, otherwise trained on its correct rollouts
        baseline_Q = np.where(share_Q > 0.5, high_Q, low_Q)
        one_sided_B = rewards_B - baseline_Q[group_B]
        is_even_Q = np.minimum(share_Q, 1.0 - share_Q) >= self.evenest
        is_mixed_Q = mixed_groups(rewards_B, group_B, num_groups)
        two_sided_B = rloo.advantage(rewards_B, group_B)
        chosen_B = np.where((is_even_Q & (self.evenest < 0.5))[group_B], two_sided_B, one_sided_B)
        return np.where(is_mixed_Q[group_B], chosen_B, 0.0)
