"""`tis`: REINFORCE with truncated importance weights between sampler and trainer (token level; Yao
et al., 2025).

The engine that sampled and the trainer that differentiates never agree to the last bit, in bfloat16
not to the second digit. Each token is weighted by min(trainer / sampler, `cap`), as a constant: no
gradient flows through the weight."""

from typing import Literal

import torch

from tasks.train.methods.loss.clip import average
from tasks.train.rollouts import StepTotals


def loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    A_B: torch.Tensor,
    mask_BT: torch.Tensor,
    totals: StepTotals,
    *,
    cap: float,
    normalize: Literal["token", "sequence", "constant"],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's share of the step's loss, and the number of tokens whose weight the cap
    cut."""
    weight_BT = torch.where(mask_BT, logprobs_BT.detach() - sampler_logprobs_BT, 0.0).exp()
    own_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0.0).exp()
    gain_BT = weight_BT.clamp_max(cap) * A_B[:, None] * own_BT
    return -average(gain_BT, mask_BT, totals, normalize), {
        "clipped": ((weight_BT > cap) & mask_BT).sum()
    }
