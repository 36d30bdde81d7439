"""`vespo`: REINFORCE with a weight that is a smooth function of the whole completion's ratio
(VESPO, arXiv 2602.10693).

With W the product of a completion's ratios, its tokens' weight is W^k * exp(lambda * (1 - W)),
without gradient: 1 on-policy, and smaller if the completion has become much likelier or rarer. W
includes each token's weight for the difference of old policy and sampler (`train.correction`),
which does not multiply the gradient again. A token of weight 0 is removed, and W is then almost 0.
As in TRL, the average is over tokens."""

from tasks.common.params import at_least, settings
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss

LARGEST = 80.0  # largest log-ratio whose exponential float32 can represent
LEAST = 1e-8  # smallest weight of a token in the product


@settings
class Settings:
    power_positive: float = 2.0  # k where the advantage is at least 0
    decay_positive: float = 3.0  # lambda where the advantage is at least 0
    power_negative: float = 3.0  # k where the advantage is negative
    decay_negative: float = 2.0  # lambda where the advantage is negative
    normalize: Normalize = "token"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        at_least(
            0,
            train__loss__power_positive=self.power_positive,
            train__loss__decay_positive=self.decay_positive,
            train__loss__power_negative=self.power_negative,
            train__loss__decay_negative=self.decay_negative,
        )


class Method(Loss):
    settings: Settings
    multiplies_weights = True

    def gains(self, tokens: Tokens) -> Gains:
        settings = self.settings
        log_ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).detach()
        log_ratio_N = log_ratio_N + tokens.weights_N.clamp(min=LEAST).log()
        log_ratio_N = tokens.by_row(log_ratio_N)[tokens.row_N].clamp(max=LARGEST)
        falling_N = 1.0 - log_ratio_N.exp()
        up_N = settings.power_positive * log_ratio_N + settings.decay_positive * falling_N
        down_N = settings.power_negative * log_ratio_N + settings.decay_negative * falling_N
        weights_N = up_N.where(tokens.advantages_N >= 0, down_N).exp() * (tokens.weights_N > 0)
        gain_N = weights_N * tokens.advantages_N * tokens.logprobs_N
        return gain_N, gain_N.new_zeros(())
