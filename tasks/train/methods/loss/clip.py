"""`clip`: the clipped surrogate of PPO, with a clip for each side, and its descendants as settings.

The ratio is of the policy to the policy before the batch's first update; what the sampler differs
from that is corrected by weights (see `learner/correction.py`). `ratio: token` is the ratio of
every token; `sequence` is the geometric mean over the completion, one ratio a rollout (GSPO, arXiv
2507.18071). `normalize` says how the step's tokens are averaged (see `tokens.average`). Every
divisor is of the *whole step*, dead groups included, so micro-batches add up. sGPO averages per
query instead.
"""

from typing import TYPE_CHECKING

from tasks.common.params import settings
from tasks.train.rollouts import StepTotals
from tasks.train.slots import Loss
from tasks.train.tokens import Level, Normalize, Tokens, average

if TYPE_CHECKING:
    import torch


@settings
class Settings:
    """The clips below and above a ratio of 1, the level of the ratio, and the average."""

    clip_low: float = 0.2  # below a ratio of 1
    clip_high: float = 0.28  # above it
    ratio: Level = "token"  # token | sequence
    normalize: Normalize = "token"  # how the step's tokens are averaged


EXAMPLE = Settings(clip_low=0.2, clip_high=0.28, ratio="token", normalize="token")


class Method(Loss):
    def __init__(self, settings: Settings) -> None:
        self.settings, self.normalize = settings, settings.normalize

    def __call__(
        self, tokens: Tokens, totals: StepTotals
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """The micro-batch's share of the step's loss; `clipped`: tokens without gradient because
        of the clip."""
        settings = self.settings
        log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
        if settings.ratio == "sequence":
            log_ratio_N = sequence_ratio(log_ratio_N, tokens)
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
        # PPO's pessimistic bound: of the two surrogates the smaller
        gain_N = ratio_N * tokens.advantages_N
        bound_N = clipped_N * tokens.advantages_N
        surrogate_N = gain_N.minimum(bound_N) * tokens.weights_N
        loss = -average(surrogate_N, tokens, totals, settings.normalize)
        return loss, {"clipped": (gain_N > bound_N).sum()}


def sequence_ratio(log_ratio_N: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
    """[N] the mean log-ratio of each rollout at all its tokens; each token carries its own share of
    the gradient."""
    mean_B = tokens.by_row(log_ratio_N.detach()) / tokens.length_B()
    own_N = tokens.logprobs_N - tokens.logprobs_N.detach()
    return mean_B[tokens.row_N] + own_N
