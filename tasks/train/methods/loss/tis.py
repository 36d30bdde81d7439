"""`tis`: REINFORCE with truncated importance weights between sampler and trainer (token level; Yao
et al., 2025).

The engine that sampled and the trainer that differentiates never agree to the last bit, in bfloat16
not to the second digit. Each token is weighted by min(trainer / sampler, `cap`), as a constant: no
gradient flows through the weight."""

from dataclasses import dataclass

import torch

from tasks.train.methods.loss.clip import Normalize, average
from tasks.train.rollouts import StepTotals
from tasks.train.slots import Loss


@dataclass(frozen=True)
class Settings:
    """The largest weight, and the average."""

    cap: float
    normalize: Normalize


EXAMPLE = Settings(cap=2.0, normalize="sequence")


class Method(Loss):
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(
        self,
        logprobs_BT: torch.Tensor,
        sampler_logprobs_BT: torch.Tensor,
        advantages_B: torch.Tensor,
        mask_BT: torch.Tensor,
        totals: StepTotals,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the step's loss; `clipped`: tokens above the cap."""
        cap = self.settings.cap
        log_weight_BT = torch.where(mask_BT, logprobs_BT.detach() - sampler_logprobs_BT, 0.0)
        weight_BT = log_weight_BT.exp()
        # 1 in value, with the gradient of the log-probability
        own_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0.0).exp()
        gain_BT = weight_BT.clamp_max(cap) * advantages_B[:, None] * own_BT
        loss = -average(gain_BT, mask_BT, totals, self.settings.normalize)
        return loss, {"clipped": ((weight_BT > cap) & mask_BT).sum()}
