"""`vcpo`: REINFORCE with importance weights, and a learning rate that depends on their effective
sample size (VCPO, arXiv 2602.17616; rule from the authors' code).

Nothing is clipped; the weights of old policy over sampler are truncated by `train.correction`,
which the paper sets to `{ratio_to: old, level: sequence, cap: 8.0}`; with `ratio_to: sampler` there
are no weights. The learning rate of an update is multiplied by min(1, ESS / (B * base)) ** power,
with ESS = (sum w)^2 / sum w^2 for untruncated weights of the update's B rollouts with a gradient:
if a few rollouts carry most of the weight, the policy moves less. On-policy the factor is 1. The
paper's `power` is 0.5, and 1.0 is its linear option."""

import numpy as np

from tasks.common.params import ParamsError, at_least, settings
from tasks.train.data.columns import Floats
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss


@settings
class Settings:
    base: float = 1.0  # effective sample size / B below which the learning rate falls
    power: float = 0.5  # exponent of the effective sample size
    normalize: Normalize = "token"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        at_least(0, train__loss__power=self.power)
        if not 0.0 < self.base <= 1.0:
            raise ParamsError(f"train.loss.base is {self.base}: it must be above 0 and at most 1")


class Method(Loss):
    settings: Settings

    def gains(self, tokens: Tokens) -> Gains:
        ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).exp()
        gain_N = ratio_N * tokens.advantages_N * tokens.weights_N
        return gain_N, gain_N.new_zeros(())

    def rate_factor(self, log_weights_B: Floats, norm: float, reuse: int) -> float:
        share = effective_share(log_weights_B) / self.settings.base
        return float(min(share, 1.0) ** self.settings.power)


def effective_share(log_weights_B: Floats) -> float:
    """Return the effective sample size of B weighted rollouts as a share of B. It is computed from
    logarithms: the product of a long sequence's ratios could overflow or underflow."""
    weights_B = np.exp(log_weights_B - log_weights_B.max())
    return float(weights_B.sum() ** 2 / (weights_B**2).sum() / len(weights_B))
