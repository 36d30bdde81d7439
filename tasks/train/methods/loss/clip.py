"""`clip`: the clipped surrogate of PPO, with a clip for each side, and its descendants as settings.

`ratio: token` is the ratio of every token; `sequence` is the geometric mean over the completion,
one ratio a rollout (GSPO, arXiv 2507.18071). `normalize` says how the step's tokens are averaged:

- `token`: over all tokens of the step (DAPO, arXiv 2503.14476: with asymmetric clips)
- `sequence`: over each completion, then over rollouts (GRPO, arXiv 2402.03300, and GSPO)
- `constant`: by rollouts times the token limit (Dr. GRPO, arXiv 2503.20783: no length bias)

Every divisor is of the *whole step*, dead groups included, so micro-batches add up. sGPO averages
per query instead."""

from dataclasses import dataclass
from typing import Literal

import torch

from tasks.train.rollouts import StepTotals
from tasks.train.slots import Loss

Normalize = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Settings:
    """The clips below and above a ratio of 1, the level of the ratio, and the average."""

    clip_low: float
    clip_high: float
    ratio: Literal["token", "sequence"]
    normalize: Normalize


EXAMPLE = Settings(clip_low=0.2, clip_high=0.28, ratio="token", normalize="token")


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
        """The micro-batch's share of the step's loss; `clipped`: tokens without gradient because
        of the clip."""
        settings = self.settings
        log_ratio_BT = torch.where(mask_BT, logprobs_BT - sampler_logprobs_BT, 0.0)
        if settings.ratio == "sequence":
            log_ratio_BT = sequence_ratio(log_ratio_BT, logprobs_BT, mask_BT)
        ratio_BT = log_ratio_BT.exp()
        clipped_BT = ratio_BT.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
        # PPO's pessimistic bound: of the two surrogates the smaller
        gain_BT = ratio_BT * advantages_B[:, None]
        bound_BT = clipped_BT * advantages_B[:, None]
        outside_BT = (gain_BT > bound_BT) & mask_BT
        loss = -average(torch.minimum(gain_BT, bound_BT), mask_BT, totals, settings.normalize)
        return loss, {"clipped": outside_BT.sum()}


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
    values_BT: torch.Tensor, mask_BT: torch.Tensor, totals: StepTotals, normalize: Normalize
) -> torch.Tensor:
    """The micro-batch's share of the step's average of `values_BT` over its tokens."""
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    if normalize == "sequence":
        return (values_BT.sum(-1) / mask_BT.sum(-1).clamp_min(1)).sum() / totals.num_rollouts
    divisor = totals.num_tokens if normalize == "token" else totals.num_rollouts * totals.max_tokens
    return values_BT.sum() / divisor
