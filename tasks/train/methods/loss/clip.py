"""`clip`: PPO's clipped surrogate, with a clip for each side; its later variants are settings.

The ratio compares the policy with the policy before the batch's first update; weights correct for
the difference from the sampler (see `learner/correction.py`). `ratio: token` is the ratio of a
token; `sequence` is the geometric mean over the completion, one ratio per rollout (GSPO, arXiv
2507.18071). `normalize` sets the average over the step's tokens (see `tokens.average`). Every
divisor counts the *whole step*, including groups with equal rewards, so micro-batches add up.

`dual` bounds the loss of a token with a negative advantage at `dual` times |advantage| (dual-clip
PPO, arXiv 1912.09729). `max_ratio` caps the ratio before the minimum, for both signs (INTELLECT-2,
arXiv 2505.07291): the plain clip lets a negative advantage through at any ratio."""

from typing import TYPE_CHECKING

from tasks.common.params import ParamsError, at_least, settings
from tasks.train.data.tokens import Gains, Level, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss

if TYPE_CHECKING:
    import torch


@settings
class Settings:
    clip_low: float = 0.2  # clip below a ratio of 1
    clip_high: float = 0.28  # clip above a ratio of 1
    ratio: Level = "token"  # level of the ratio
    normalize: Normalize = "token"  # how the step's tokens are averaged
    dual: float | None = None  # a negative advantage has no gradient above this ratio; above 1
    max_ratio: float | None = None  # cap on the ratio itself, for advantages of both signs
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        at_least(0, train__loss__clip_low=self.clip_low, train__loss__clip_high=self.clip_high)
        if self.dual is not None and self.dual <= 1.0:
            raise ParamsError(
                f"train.loss.dual is {self.dual}; it is a ratio above 1, such as 3, or null"
            )
        if self.max_ratio is not None and self.max_ratio <= 1.0:
            raise ParamsError(
                f"train.loss.max_ratio is {self.max_ratio}; it is a ratio above 1, such as 4, or "
                "null"
            )


class Method(Loss):
    separable = True
    settings: Settings

    def gains(self, tokens: Tokens) -> Gains:
        settings = self.settings
        log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
        if settings.ratio == "sequence":
            log_ratio_N = sequence_ratio(log_ratio_N, tokens)
        ratio_N = log_ratio_N.exp()
        if settings.max_ratio is not None:
            ratio_N = ratio_N.clamp(max=settings.max_ratio)
        clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
        # PPO's pessimistic bound: the smaller of the two surrogates
        gain_N = ratio_N * tokens.advantages_N
        bound_N = clipped_N * tokens.advantages_N
        surrogate_N = gain_N.minimum(bound_N)
        is_clipped_N = gain_N > bound_N
        if settings.max_ratio is not None:
            is_clipped_N = is_clipped_N | (ratio_N >= settings.max_ratio)
        if settings.dual is not None:
            floor_N = settings.dual * tokens.advantages_N
            is_below_N = (tokens.advantages_N < 0) & (surrogate_N < floor_N)
            surrogate_N = floor_N.where(is_below_N, surrogate_N)
            is_clipped_N = is_clipped_N | is_below_N
        return surrogate_N * tokens.weights_N, is_clipped_N


def sequence_ratio(log_ratio_N: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
    """Return [N] the mean log-ratio of each token's rollout. Its gradient is the gradient of the
    token's own log-probability."""
    mean_B = tokens.by_row(log_ratio_N.detach()) / tokens.length_B()
    own_N = tokens.logprobs_N - tokens.logprobs_N.detach()
    return mean_B[tokens.row_N] + own_N
