"""`gmpo`: the geometric mean of a completion's ratios, each clipped on its pessimistic side (GMPO,
arXiv 2507.20673).

One token with an extreme ratio moves a geometric mean less than an arithmetic one, so the clip may
be wide. `clip` bounds the log-ratio. The average is over completions."""

from tasks.common.params import above_zero, settings
from tasks.train.data.tokens import Gains, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss


@settings
class Settings:
    clip: float = 0.4  # bound on a token's |log-ratio|
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        above_zero(train__loss__clip=self.clip)


class Method(Loss):
    settings: Settings
    normalize = "sequence"

    def gains(self, tokens: Tokens) -> Gains:
        limit = self.settings.clip
        log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
        # no gain beyond the clip: above for A > 0, below for A < 0
        is_positive_N = tokens.advantages_N > 0
        is_clipped_N = ((log_ratio_N > limit) & is_positive_N) | (
            (log_ratio_N < -limit) & ~is_positive_N
        )
        bounded_N = log_ratio_N.clamp(-limit, limit)
        bounded_N = bounded_N.where(is_clipped_N, log_ratio_N)
        mean_B = tokens.by_row(bounded_N.detach()) / tokens.length_B()
        # each token has its own share of the gradient, so a masked token has none
        ratio_N = (mean_B[tokens.row_N] + bounded_N - bounded_N.detach()).exp()
        return ratio_N * tokens.advantages_N * tokens.weights_N, is_clipped_N
