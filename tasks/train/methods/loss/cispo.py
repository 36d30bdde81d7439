"""`cispo`: REINFORCE with a capped importance ratio without gradient (CISPO, arXiv 2506.13585; cap
5 as in ScaleRL, arXiv 2510.13786).

Every token keeps its gradient, even beyond the cap; with `clip`, rare tokens lose theirs first."""

from tasks.common.params import above_zero, settings
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss


@settings
class Settings:
    cap: float = 5.0  # maximum ratio
    normalize: Normalize = "token"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        above_zero(train__loss__cap=self.cap)


class Method(Loss):
    separable = True
    settings: Settings

    def gains(self, tokens: Tokens) -> Gains:
        ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).detach().exp()
        weights_N = ratio_N.clamp(max=self.settings.cap) * tokens.weights_N
        gain_N = weights_N * tokens.advantages_N * tokens.logprobs_N
        return gain_N, ratio_N > self.settings.cap
