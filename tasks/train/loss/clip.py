"""`clip`: the clipped surrogate of PPO with a clip for each side (DAPO, arXiv 2503.14476), averaged over tokens.

The sum over a micro-batch is divided by the completion tokens of the *whole step* (all rollouts that select let
through, dead groups included), so micro-batches add up to the step whatever their packing. sGPO averages per query
instead. With clip_low = clip_high it is PPO's and GRPO's loss.
"""

import torch


def loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    A_B: torch.Tensor,
    mask_BT: torch.Tensor,
    num_tokens_of_step: int,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's share of the step's loss, and sums over its tokens for the record."""
    log_ratio = torch.where(mask_BT, logprobs_BT - sampler_logprobs_BT, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(ratio * A_B[:, None], clipped * A_B[:, None])
    outside = (ratio * A_B[:, None] > clipped * A_B[:, None]) & mask_BT
    return -(gain * mask_BT).sum() / num_tokens_of_step, {"clipped": outside.sum()}
