"""The policy-gradient update: log-probabilities of what was sampled, the loss over micro-batches, one optimizer step.

Legend: B rollouts of a micro-batch, T positions from the first that predicts a completion token, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tasks.common.ledger import Architecture, forward_flops
from tasks.train.batch import Floats, MicroBatch


@dataclass
class UpdateStats:
    """Sums over the tokens of a step's micro-batches; `flops` is what forward and backward executed."""

    loss: float = 0.0
    num_tokens: int = 0
    entropy: float = 0.0
    clipped: float = 0.0
    log_ratio: float = 0.0
    log_ratio_max: float = 0.0
    flops: float = 0.0


def token_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] log-probabilities of the targets at `temperature`, and [B, T] entropies (without gradient), float32."""
    num_positions = batch.targets_BT.shape[1]
    output = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=num_positions)
    logprobs_BTV = (output.logits.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    return logprobs_BTV.gather(-1, batch.targets_BT[..., None])[..., 0], entropy_BT


def accumulate_gradients(
    model: PreTrainedModel,
    batches: list[MicroBatch],
    advantages_B: Floats,
    loss: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]],
    num_tokens_of_step: int,
    temperature: float,
    architecture: Architecture,
) -> UpdateStats:
    """Add the gradient of the whole step's loss to the parameters, a micro-batch at a time."""
    stats = UpdateStats()
    for batch in batches:
        logprobs_BT, entropy_BT = token_logprobs(model, batch, temperature)
        advantages = torch.from_numpy(advantages_B[batch.rows]).to(logprobs_BT)
        part, sums = loss(logprobs_BT, batch.sampler_logprobs_BT, advantages, batch.mask_BT, num_tokens_of_step)
        part.backward()
        gap_BT = torch.where(batch.mask_BT, logprobs_BT.detach() - batch.sampler_logprobs_BT, 0.0).abs()
        stats.loss += part.item()
        stats.num_tokens += int(batch.mask_BT.sum())
        stats.entropy += (entropy_BT * batch.mask_BT).sum().item()
        stats.clipped += float(sums["clipped"])
        stats.log_ratio += gap_BT.sum().item()
        stats.log_ratio_max = max(stats.log_ratio_max, gap_BT.max().item())
        rows, length = batch.input_ids.shape
        stats.flops += 3.0 * forward_flops(
            architecture, rows * length, rows * batch.targets_BT.shape[1], float(rows) * length * length
        )
    return stats


def learning_rate(base: float, final_rate: float, warmup_steps: int, step: int, progress: float) -> float:
    """Linear warm-up over `warmup_steps`, and linear decay with the plan's progress down to `final_rate` of `base`."""
    warm = min((step + 1) / warmup_steps, 1.0) if warmup_steps else 1.0
    return base * warm * (1.0 - (1.0 - final_rate) * progress)
