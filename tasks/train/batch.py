"""What a training step works on: the request for it, the rollouts that answer it, and their micro-batches.

Legend: B rollouts of the step, Q groups (visits), T positions. Groups are ragged: `group_B` says which group a rollout
is of, and no array is reshaped to [-1, G].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.sampling.engine import Samples

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Prompts:
    """Prompts ready to be sampled and graded, by row."""

    ids: list[str]
    token_ids: list[list[int]]
    answers: list[str]
    verifiers: list[str]


@dataclass(frozen=True)
class Request:
    """What control asks for: `counts[q]` rollouts of the prompt in row `prompt_rows[q]` of the training prompts."""

    prompt_rows: Ints
    counts: Ints
    pass_number: int
    phase: int


@dataclass(frozen=True)
class Rollouts:
    """B graded rollouts in Q groups, group by group."""

    prompt_rows_Q: Ints
    prompts: list[list[int]]
    group_B: Ints
    samples: Samples
    texts: list[str]
    outcomes: list[str]
    rewards_B: Floats

    def prompt_tokens_B(self) -> Ints:
        """Length of each rollout's prompt."""
        return np.array([len(ids) for ids in self.prompts], dtype=np.int64)[self.group_B]

    def completion_tokens_B(self) -> Ints:
        """Length of each rollout's completion, its stop token counted."""
        return np.array([len(ids) for ids in self.samples.token_ids], dtype=np.int64)

    def is_error_B(self) -> Bools:
        """Whether a rollout could not be graded, through our own fault."""
        return np.array([outcome == "error" for outcome in self.outcomes], dtype=np.bool_)


@dataclass(frozen=True)
class MicroBatch:
    """Some rollouts padded to one length. Position t predicts token t + 1; `mask_BT` marks completion tokens.

    Padding stands at the end, where a causal model cannot see it, so no attention mask is needed. All [B, T] arrays
    but `input_ids` cover the last T positions, from the earliest position that predicts a completion token.
    """

    rows: Ints
    input_ids: torch.Tensor
    targets_BT: torch.Tensor
    mask_BT: torch.Tensor
    sampler_logprobs_BT: torch.Tensor


def merge(parts: Sequence[Rollouts]) -> Rollouts:
    """The rollouts of several requests of one step, groups renumbered one after another."""
    offsets = np.cumsum([0] + [len(part.prompt_rows_Q) for part in parts])
    samples = Samples(
        [ids for part in parts for ids in part.samples.token_ids],
        [logprobs for part in parts for logprobs in part.samples.logprobs],
        [reason for part in parts for reason in part.samples.finish_reasons],
    )
    return Rollouts(
        np.concatenate([part.prompt_rows_Q for part in parts]),
        [ids for part in parts for ids in part.prompts],
        np.concatenate([part.group_B + offset for part, offset in zip(parts, offsets, strict=False)]),
        samples,
        [text for part in parts for text in part.texts],
        [outcome for part in parts for outcome in part.outcomes],
        np.concatenate([part.rewards_B for part in parts]),
    )


def mixed_groups(rewards_B: Floats, group_B: Ints, num_groups: int) -> Bools:
    """[Q] whether a group has two different rewards. Rewards are compared, never a spread with a threshold."""
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group_B, rewards_B)
    np.maximum.at(high, group_B, rewards_B)
    return np.asarray(high > low)


def micro_batches(rollouts: Rollouts, rows: Ints, max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """`rows` in micro-batches of at most `max_tokens` padded tokens (one row at least), the longest rows first, so
    that rows of one length share a batch and what needs the most memory comes first."""
    lengths = rollouts.prompt_tokens_B() + rollouts.completion_tokens_B()
    order = sorted(rows.tolist(), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [pad(rollouts, np.array(batch), device) for batch in batches]


def pad(rollouts: Rollouts, rows: Ints, device: torch.device) -> MicroBatch:
    """One micro-batch of the rollouts `rows`."""
    prompts = [rollouts.prompts[rollouts.group_B[row]] for row in rows]
    completions = [rollouts.samples.token_ids[row] for row in rows]
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    first = min(map(len, prompts)) - 1
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    mask, logprobs = np.zeros_like(input_ids, dtype=np.bool_), np.zeros(input_ids.shape, dtype=np.float32)
    for i, (row, prompt, completion) in enumerate(zip(rows, prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion)
        input_ids[i, :start], input_ids[i, start:end] = prompt, completion
        mask[i, start:end] = True
        logprobs[i, start:end] = rollouts.samples.logprobs[row]
    return MicroBatch(
        rows,
        torch.from_numpy(input_ids[:, :-1]).to(device),
        torch.from_numpy(input_ids[:, first + 1 :]).to(device),
        torch.from_numpy(mask[:, first + 1 :]).to(device),
        torch.from_numpy(logprobs[:, first + 1 :]).to(device),
    )
