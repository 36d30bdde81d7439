"""`clip`: the clipped surrogate of PPO, with a clip for each side, and its descendants as settings.

`ratio: token` is the ratio of every token; `sequence` is the geometric mean over the completion,
one ratio a rollout (GSPO, arXiv 2507.18071). `normalize` says how the step's tokens are averaged:

- `token`: over all tokens of the step (DAPO, arXiv 2503.14476: with asymmetric clips)
- `sequence`: over each completion, then over rollouts (GRPO, arXiv 2402.03300, and GSPO)
- `constant`: by rollouts times the token limit (Dr. GRPO, arXiv 2503.20783: no length bias)

Every divisor is of the *whole step*, dead groups included, so micro-batches add up. sGPO averages
per query instead."""

from typing import Literal

import torch

from tasks.train.rollouts import StepTotals


def loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    A_B: torch.Tensor,
    mask_BT: torch.Tensor,
    totals: StepTotals,
    *,
    clip_low: float,
    clip_high: float,
    ratio: Literal["token", "sequence"],
    normalize: Literal["token", "sequence", "constant"],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's share of the step's loss, and the number of tokens whose gradient the clip
    took."""
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - sampler_logprobs_BT, 0.0)
    if ratio == "sequence":
        log_ratio_BT = sequence_ratio(log_ratio_BT, logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain_BT = torch.minimum(ratio_BT * A_B[:, None], clipped_BT * A_B[:, None])
    outside_BT = (ratio_BT * A_B[:, None] > clipped_BT * A_B[:, None]) & mask_BT
    return -average(gain_BT, mask_BT, totals, normalize), {"clipped": outside_BT.sum()}


def sequence_ratio(
    log_ratio_BT: torch.Tensor, logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """[B, T] the mean log-ratio of each row at all its tokens; each token carries its own share of
    the gradient."""
    length_B = mask_BT.sum(-1).clamp_min(1)
    mean_B = log_ratio_BT.sum(-1) / length_B
    own_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0.0)
    return torch.where(mask_BT, mean_B.detach()[:, None] + own_BT, 0.0)


def average(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, totals: StepTotals, normalize: str
) -> torch.Tensor:
    """The micro-batch's share of the step's average of `values_BT` over its tokens."""
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    if normalize == "sequence":
        return (values_BT.sum(-1) / mask_BT.sum(-1).clamp_min(1)).sum() / totals.num_rollouts
    divisor = totals.num_tokens if normalize == "token" else totals.num_rollouts * totals.max_tokens
    return values_BT.sum() / divisor
