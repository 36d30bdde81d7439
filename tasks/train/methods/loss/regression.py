"""`regression`: the log-ratio of policy and reference is regressed on the advantage (A*-PO, arXiv
2505.20686).

The loss is the mean over completions of w (beta * sum of log-ratios - advantage)^2, with w the
completion's mean importance weight. If `a_star` has the same beta, the loss is 0 at the optimum of
the reward minus beta times the KL divergence from the reference, the initial policy. A batch allows
several updates, without clipping. At the reference the gradient is REINFORCE's times 2 beta."""

from typing import TYPE_CHECKING

from tasks.common.params import above_zero, settings
from tasks.train.data.rollouts import StepTotals
from tasks.train.data.tokens import Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss

if TYPE_CHECKING:
    import torch


@settings
class Settings:
    beta: float = 1.0e-3  # factor of the log-ratio, in units of reward
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        above_zero(train__loss__beta=self.beta)


class Method(Loss):
    settings: Settings
    normalize = "sequence"
    reads_reference = True

    def __call__(
        self, tokens: Tokens, totals: StepTotals
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """Return the micro-batch's share of the step's loss; nothing is clipped."""
        assert tokens.reference_logprobs_N is not None
        length_B = tokens.length_B()
        log_ratio_B = tokens.by_row(tokens.logprobs_N - tokens.reference_logprobs_N)
        advantage_B, weight_B = (
            tokens.by_row(values_N) / length_B
            for values_N in (tokens.advantages_N, tokens.weights_N)
        )
        error_B = self.settings.beta * log_ratio_B - advantage_B
        loss = (weight_B * error_B**2).sum() / totals.num_rollouts
        return loss, {"clipped": loss.new_zeros(())}
