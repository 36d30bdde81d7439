"""Forward FLOPs that sampling executes. Shared prefills are counted once, and conversations turn
by turn. Each completion that continues after a stop or with new weights adds a prefill."""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tasks.common.accounting.ledger import Architecture, decode_flops, forward_flops, prefill_flops
from tasks.engines.engine import Request, Samples


def completion_flops(
    architecture: Architecture, request: Request, samples: Samples, prefix_block: int
) -> float:
    """Return the total executed forward FLOPs of a request's completions.

    A completion that continues, after a stop or with new weights, repeats the prefill of its prompt
    and its tokens so far: old KV caches are not kept. For conversations see `turn_flops`."""
    prompt_tokens = [len(prompt) for prompt in request.prompts]
    if samples.is_action is not None:
        own = samples.is_action
        return float(
            turn_flops(architecture, prompt_tokens, request.counts, own, prefix_block).sum()
        )
    begun: dict[tuple[int, int], list[int]] = {}  # lengths, by prompt and version
    resumed: dict[tuple[tuple[int, ...], int], list[tuple[int, int]]] = {}
    rows = zip(request.owner_B().tolist(), request.written_B().tolist(), strict=True)
    for row, (owner, before) in enumerate(rows):
        length = len(samples.token_ids[row])
        versions = samples.versions[row] if samples.versions else [0] * length
        for start, end in itertools.pairwise([*changes(versions), length]):
            if before + start == 0:
                begun.setdefault((owner, versions[start]), []).append(end)
            else:
                prompt = tuple(request.prompts[owner][: prompt_tokens[owner] - before])
                spans = resumed.setdefault((prompt, versions[start]), [])
                spans.append((before + start, end - start))
    first = sample_flops(
        architecture,
        [prompt_tokens[owner] for owner, _ in begun],
        [len(lengths) for lengths in begun.values()],
        [*itertools.chain(*begun.values())],
        prefix_block,
    )
    return float(first.sum()) + sum(
        resumed_flops(architecture, len(prompt), spans, prefix_block)
        for (prompt, _), spans in resumed.items()
    )


def resumed_flops(
    architecture: Architecture,
    prompt_tokens: int,
    spans: Sequence[tuple[int, int]],
    prefix_block: int,
) -> float:
    """Return the total executed forward FLOPs of completions of one prompt that continue together.
    Each span is (number of tokens sampled before, number sampled now) of a completion.

    The prompt's whole blocks are computed once, then cached (if `prefix_block` is above 1)."""
    shared = float(prompt_tokens // prefix_block * prefix_block) if prefix_block > 1 else 0.0
    again = [
        prefill_flops(architecture, prompt_tokens + before)
        + decode_flops(architecture, prompt_tokens + before, written)
        for before, written in spans
    ]
    return sum(again) - (len(spans) - 1) * forward_flops(architecture, shared, 0.0, shared * shared)


def changes(versions: Sequence[int]) -> list[int]:
    """Return 0, then the positions where the policy's version changes; [] without versions."""
    places = enumerate(itertools.pairwise(versions), start=1)
    later = [place for place, (before, after) in places if before != after]
    return [0, *later] if versions else []


def turn_flops(
    architecture: Architecture,
    prompt_tokens: Sequence[int],
    num_samples: Sequence[int],
    is_action: Sequence[Sequence[bool]],
    prefix_block: int,
) -> npt.NDArray[np.float64]:
    """Return the executed forward FLOPs [B] of conversations. `is_action` marks the policy's
    tokens.

    The first turns share their prompt's prefill. A later turn computes its whole context, except
    cached whole blocks. The last token of the previous turn was never fed, so it is not cached."""
    turns_B = [turns_of(own) for own in is_action]
    lengths = [turns[0][1] for turns in turns_B]
    flops = sample_flops(architecture, prompt_tokens, num_samples, lengths, prefix_block)
    prompt_B = np.repeat(prompt_tokens, num_samples).tolist()
    for row, (prompt, turns) in enumerate(zip(prompt_B, turns_B, strict=True)):
        fed = prompt + lengths[row] - 1
        for start, length in turns[1:]:
            read = prompt + start
            flops[row] += prefill_flops(architecture, read)
            flops[row] += decode_flops(architecture, read, length)
            cached = fed // prefix_block * prefix_block if prefix_block > 1 else 0
            if cached:
                flops[row] -= prefill_flops(architecture, cached)
            fed = read + length - 1
    return flops


def turns_of(is_action: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the start and the length of each of the policy's turns. The first starts at 0."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_action, [False]]).astype(np.int8)))
    return [(int(start), int(end - start)) for start, end in edges.reshape(-1, 2)]


def sample_flops(
    architecture: Architecture,
    prompt_tokens: Sequence[int],
    num_samples: Sequence[int],
    completion_tokens: Sequence[int],
    prefix_block: int,
) -> npt.NDArray[np.float64]:
    """Return the executed forward FLOPs of each of B completions. The shared part of a prefill is
    split evenly over the prompt's completions.

    `completion_tokens` has one entry per completion, in the order of `Samples`. Padding is not
    counted. The contract suite compares this with torch's own counter."""
    flops = np.zeros(len(completion_tokens))
    start = 0
    for length, count in zip(prompt_tokens, num_samples, strict=True):
        # whole blocks are shared, except that the last token is computed for every completion
        shared = (length - 1) // prefix_block * prefix_block if prefix_block > 1 else length
        shared_flops = prefill_flops(architecture, shared)
        own_flops = prefill_flops(architecture, length) - shared_flops if shared < length else 0.0
        for row in range(start, start + count):
            decode = decode_flops(architecture, length, completion_tokens[row])
            flops[row] = shared_flops / count + own_flops + decode
        start += count
    return flops
