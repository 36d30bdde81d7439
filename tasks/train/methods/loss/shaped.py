"""`shaped`: importance-weighted REINFORCE without a clip, in which rare tokens of replayed rollouts
weigh more (the policy shaping of ExGRPO, arXiv 2510.02245, and LUFFY, arXiv 2504.14945).

A fresh token is weighted by the ratio of policy to old policy and by `train.correction`, a replayed
one by w / (w + shaping), where w is the ratio of policy to sampler: the coefficient of its
gradient, shaping w / (w + shaping)^2, is largest at w = shaping and falls beyond. With `shaping`
null a replayed token is treated like a fresh one."""

import math

import numpy as np

from tasks.common.params import above_zero, settings
from tasks.train.data.columns import Bools
from tasks.train.data.rollouts import Rollouts
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss


@settings
class Settings:
    shaping: float | None = 0.1  # ratio at which a replayed token has weight 1/2
    normalize: Normalize = "constant"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        if self.shaping is not None:
            above_zero(train__loss__shaping=self.shaping)


class Method(Loss):
    settings: Settings
    separable = True

    def gains(self, tokens: Tokens) -> Gains:
        weight_N = (tokens.logprobs_N - tokens.old_logprobs_N).exp() * tokens.weights_N
        if tokens.marked_N is not None:
            assert self.settings.shaping is not None
            assert tokens.sampler_logprobs_N is not None
            log_ratio_N = tokens.logprobs_N - tokens.sampler_logprobs_N
            # w / (w + s) as a sigmoid, whose gradient is finite for any w
            shaped_N = (log_ratio_N - math.log(self.settings.shaping)).sigmoid()
            weight_N = shaped_N.where(tokens.marked_N, weight_N)
        return weight_N * tokens.advantages_N, weight_N.new_zeros(())

    def marks(self, rollouts: Rollouts) -> Bools | None:
        if self.settings.shaping is None:
            return None
        return np.asarray(rollouts.replayed_B[rollouts.owner_N()])
