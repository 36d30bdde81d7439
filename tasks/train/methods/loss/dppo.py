"""`dppo`: the ratio is not clipped; a token is masked if its *probability* has moved too far in the
direction of its advantage (DPPO, arXiv 2602.04879).

A ratio is large for rare tokens long before the distribution has moved. With `divergence: tv` a
token's gradient is zero if the rise of its probability, pi - mu, exceeds `limit` and the advantage
is positive, or if mu - pi exceeds it and the advantage is negative. With `divergence: kl` the
binary KL(mu | pi) is compared instead. The paper's limits are 0.2 and 0.05. `penalty` times the
squared log-ratio is added to the loss of every token; rollouts of advantage 0 are left out. mu is
the denominator of the ratio: the sampler if `train.correction.ratio_to` is `sampler`, as in the
paper, otherwise the old policy."""

from typing import TYPE_CHECKING, Literal

from tasks.common.params import above_zero, at_least, settings
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss

if TYPE_CHECKING:
    import torch


@settings
class Settings:
    divergence: Literal["tv", "kl"] = "tv"  # total variation or KL divergence of a token
    limit: float = 0.2  # maximum divergence; 0.05 with kl
    penalty: float = 0.0  # factor of the squared log-ratio
    normalize: Normalize = "token"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        above_zero(train__loss__limit=self.limit)
        at_least(0, train__loss__penalty=self.penalty)


class Method(Loss):
    separable = True
    settings: Settings

    def gains(self, tokens: Tokens) -> Gains:
        log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
        policy_N, sampler_N = tokens.logprobs_N.detach().exp(), tokens.old_logprobs_N.exp()
        moved_N = policy_N - sampler_N
        divergence_N = moved_N.abs()
        if self.settings.divergence == "kl":
            divergence_N = binary_kl(sampler_N, policy_N)
        is_masked_N = (divergence_N > self.settings.limit) & (moved_N * tokens.advantages_N > 0)
        gain_N = log_ratio_N.exp() * tokens.advantages_N * tokens.weights_N
        gain_N = gain_N.masked_fill(is_masked_N, 0.0) - self.settings.penalty * log_ratio_N**2
        return gain_N, is_masked_N


def binary_kl(first_N: "torch.Tensor", second_N: "torch.Tensor") -> "torch.Tensor":
    """Return [N] KL(first | second) over the two outcomes "this token" and "any other"."""
    first_N, second_N = (p.clamp(1e-8, 1.0 - 1e-6) for p in (first_N, second_N))
    others_N = (1.0 - first_N) * ((1.0 - first_N) / (1.0 - second_N)).log()
    return first_N * (first_N / second_N).log() + others_N
