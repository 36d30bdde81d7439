"""Importance weights between the old policy and the sampler.

The log-probabilities of engine and trainer never agree to the last bit; in bfloat16 or with
quantised weights, not even to the second digit. That difference is not staleness, so it does not
belong inside PPO's clip, which lets a negative advantage through at any high ratio and cuts a
positive one. Therefore the clipped ratio is policy over old policy, and each token is weighted by
old / sampler, truncated and without gradient (truncated importance sampling; Yao et al., 2025).

Legend: N tokens, B rollouts of a micro-batch.
"""

import numpy as np
import torch

from tasks.train.data.columns import Bools, Floats
from tasks.train.data.tokens import Tokens
from tasks.train.settings import Correction, Rejection


def corrected_tokens(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    row_N: torch.Tensor,
    num_rows: int,
    correction: Correction,
) -> tuple[Tokens, torch.Tensor]:
    """Return the tokens as input of a loss, and [N] whether a bound or `reject` changed a weight.

    Without `proximal`, the old policy is the one before the batch's first update; with a single
    update, it is the policy itself, without gradient. `ratio_to: sampler` divides by the sampler
    instead and leaves the weights at 1. `level: sequence` gives all tokens of a rollout the product
    of its ratios, which is unbiased and has a higher variance; `geometric` gives them the geometric
    mean. A weight outside `floor` and `cap` becomes the bound (`mode: truncate`) or 0
    (`mode: mask`). `reject` sets weights to 0 by its own bounds on old / sampler, or on
    policy / sampler (`policy: present`).
    """
    log_weights_N = (old_logprobs_N - sampler_logprobs_N).detach()
    if correction.ratio_to == "sampler":
        old_logprobs_N = sampler_logprobs_N
        weights_N = torch.ones_like(sampler_logprobs_N)
        cut_N = torch.zeros_like(row_N, dtype=torch.bool)
    else:
        ratios_N = at_level(log_weights_N, row_N, num_rows, correction.level).exp()
        weights_N = ratios_N.clamp(correction.floor, correction.cap)
        cut_N = (ratios_N > correction.cap) | (ratios_N < correction.floor)
        if correction.mode == "mask":
            weights_N = weights_N.masked_fill(cut_N, 0.0)
    if correction.reject is not None:
        if correction.reject.policy == "present":
            log_weights_N = (logprobs_N - sampler_logprobs_N).detach()
        rejected_N = rejects(log_weights_N, advantages_N, row_N, num_rows, correction.reject)
        weights_N, cut_N = weights_N.masked_fill(rejected_N, 0.0), cut_N | rejected_N
    return Tokens(logprobs_N, old_logprobs_N, weights_N, advantages_N, row_N, num_rows), cut_N


def far_tokens(log_ratios_N: Floats, limit: float) -> Bools:
    """Return [N] whether to mask a token. The largest |log-ratios| are masked: as few as needed to
    bring the mean square of the other log-ratios below `limit` (M2PO, arXiv 2510.01161)."""
    squares_N = log_ratios_N**2
    order = np.argsort(-squares_N, kind="stable")
    num_left = np.arange(len(order), 0, -1)
    means = np.cumsum(squares_N[order[::-1]])[::-1] / num_left  # without the first 0, 1, ...
    num = int((means >= limit).sum())
    is_far_N = np.zeros(len(order), dtype=np.bool_)
    is_far_N[order[:num]] = True
    return is_far_N


def at_level(
    log_ratios_N: torch.Tensor, row_N: torch.Tensor, num_rows: int, level: str
) -> torch.Tensor:
    """Return [N] the log-ratios of tokens, or their sums (`geometric`: means) over rollouts."""
    if level == "token":
        return log_ratios_N
    sums_B = log_ratios_N.new_zeros(num_rows).index_add(0, row_N, log_ratios_N)
    if level == "geometric":
        ones_N = torch.ones_like(log_ratios_N)
        sums_B = sums_B / log_ratios_N.new_zeros(num_rows).index_add(0, row_N, ones_N)
    return sums_B[row_N]


def rejects(
    log_ratios_N: torch.Tensor,
    advantages_N: torch.Tensor,
    row_N: torch.Tensor,
    num_rows: int,
    reject: Rejection,
) -> torch.Tensor:
    """Return [N] whether `reject` removes a token from the loss."""
    ratios_N = at_level(log_ratios_N, row_N, num_rows, reject.level).exp()
    outside_N = ratios_N < reject.low
    if reject.high is not None:
        outside_N = outside_N | (ratios_N > reject.high)
    if reject.only_negative:
        outside_N = outside_N & (advantages_N < 0)
    if reject.whole_rows:
        outside_N = row_N.new_zeros(num_rows).index_add(0, row_N, outside_N.long())[row_N] > 0
    return outside_N
