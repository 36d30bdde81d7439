"""The choice of a token from a row's logits and one uniform number. The result is the same on every
machine and in every batch.

Legend: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tasks.engines.settings import Sampling

CHUNK = 2**19  # logits of the rows that a CPU chooses together, so that its caches can hold them


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [B, 1] chosen from logits [B, V] by uniform numbers [B, 1] in [0, 1), and their
    log-probabilities [B, 1] under the sampling distribution (plain softmax at temperature 0)."""
    if logits.device.type != "cpu":
        return choose_rows(logits, uniform, sampling)
    num_rows = max(CHUNK // logits.shape[1], 1)
    parts = zip(logits.split(num_rows), uniform.split(num_rows), strict=True)
    chosen = [choose_rows(*part, sampling) for part in parts]
    return torch.cat([tokens for tokens, _ in chosen]), torch.cat([part for _, part in chosen])


def choose_rows(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `choose` does, for all rows at once."""
    logits = logits.float()
    if sampling.temperature == 0.0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1, keepdim=True)
        return tokens, logprobs.gather(1, tokens)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    logprobs = truncated_logprobs(logits, sampling.top_p, sampling.top_k)
    # invert the distribution function: choose the first token with a cumulative probability above
    # the number
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    tokens = tokens.clamp_max(logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens)


def truncated_logprobs(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Keep the `top_k` most likely tokens with ties (all tokens if `top_k` is 0), and of these the
    nucleus `top_p`. Return renormalised log-probabilities [B, V], -inf for the other tokens."""
    if top_k > 0:
        smallest = logits.topk(min(top_k, logits.shape[1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        masked = torch.zeros_like(outside).scatter(1, order, outside)  # back in the logits' order
        logits = logits.masked_fill(masked, -torch.inf)
    return logits.log_softmax(-1)


def hashed_uniforms(seeds: Sequence[int], num: int) -> npt.NDArray[np.float64]:
    """Return numbers [len(seeds), num] in [0, 1), of 53 bits each. Each is the splitmix64 hash
    (Steele et al., 2014) of a seed and a position; positions start at 1."""
    rows = np.array(seeds, dtype=np.uint64)[:, None]
    positions = np.arange(1, num + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = rows + np.uint64(0x9E3779B97F4A7C15) * positions
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)
