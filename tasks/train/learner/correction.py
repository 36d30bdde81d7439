"""Importance weights between the old policy and the sampler.

The engine that samples and the trainer that differentiates never agree to the last bit, and in
bfloat16 or quantised not to the second digit. That difference is no staleness: dividing by the
sampler's log-probabilities inside PPO's clip lets a negative advantage through at any ratio and
cuts a positive one. So the clipped ratio is of policy to old policy, and each token is weighted by
old / sampler, truncated and without gradient (truncated importance sampling; Yao et al., 2025).

Legend: N tokens, B rollouts of a micro-batch.
"""

import torch

from tasks.train.settings import Correction
from tasks.train.tokens import Tokens


def importance_weights(
    old_logprobs_N: torch.Tensor,
    sampler_logprobs_N: torch.Tensor,
    row_N: torch.Tensor,
    num_rows: int,
    correction: Correction,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] the weights, and [N] whether the cap cut them.

    `level: sequence` gives all tokens of a rollout the product of its ratios, which is unbiased and
    varies more. A weight above `cap` becomes `cap` (`mode: truncate`) or 0 (`mode: mask`).
    """
    log_weights_N = (old_logprobs_N - sampler_logprobs_N).detach()
    if correction.level == "sequence":
        sums_B = log_weights_N.new_zeros(num_rows).index_add(0, row_N, log_weights_N)
        log_weights_N = sums_B[row_N]
    weights_N = log_weights_N.exp()
    cut_N = weights_N > correction.cap
    replaced = torch.full_like(weights_N, correction.cap if correction.mode == "truncate" else 0.0)
    return torch.where(cut_N, replaced, weights_N), cut_N


def corrected_tokens(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    row_N: torch.Tensor,
    num_rows: int,
    correction: Correction,
) -> tuple[Tokens, torch.Tensor]:
    """The tokens as a loss takes them, and [N] whether the cap cut their weight.

    The old policy is that before the batch's first update; where there is but one, it is the
    policy, without gradient. `ratio_to: sampler` divides by the sampler instead and leaves the
    weights at 1.
    """
    if correction.ratio_to == "sampler":
        ones_N = torch.ones_like(sampler_logprobs_N)
        tokens = Tokens(logprobs_N, sampler_logprobs_N, ones_N, advantages_N, row_N, num_rows)
        return tokens, torch.zeros_like(row_N, dtype=torch.bool)
    weights_N, cut_N = importance_weights(
        old_logprobs_N, sampler_logprobs_N, row_N, num_rows, correction
    )
    return Tokens(logprobs_N, old_logprobs_N, weights_N, advantages_N, row_N, num_rows), cut_N
