"""`sapo`: a soft gate in place of the clip (SAPO, arXiv 2511.20347).

A token's gain is (4 / tau) * sigmoid(tau * (ratio - 1)) times its advantage: its gradient equals
REINFORCE's at ratio 1 and fades on both sides. With `tau_negative` above `tau_positive` it fades
faster if the advantage is not positive."""

from tasks.common.params import above_zero, settings
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss


@settings
class Settings:
    tau_positive: float = 1.0  # steepness of the gate where the advantage is positive
    tau_negative: float = 1.05  # steepness of the gate elsewhere
    normalize: Normalize = "sequence"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        above_zero(
            train__loss__tau_positive=self.tau_positive, train__loss__tau_negative=self.tau_negative
        )


class Method(Loss):
    separable = True
    settings: Settings

    def gains(self, tokens: Tokens) -> Gains:
        settings = self.settings
        ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).exp()
        tau_N = ratio_N.new_full(ratio_N.shape, settings.tau_negative)
        tau_N[tokens.advantages_N > 0] = settings.tau_positive
        gate_N = 4.0 / tau_N * (tau_N * (ratio_N - 1.0)).sigmoid()
        gain_N = gate_N * tokens.advantages_N * tokens.weights_N
        return gain_N, gain_N.new_zeros(())
