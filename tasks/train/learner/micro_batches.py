"""The micro-batches of a training step: the rollouts of each forward pass, and their tensors.

Legend: B rollouts, N completion tokens, L padded length, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.models.packing import Packing, pack
from tasks.models.transfer import to_device
from tasks.train.data.columns import Ints, flat, lengths_of, spans
from tasks.train.data.rollouts import Rollouts
from tasks.train.settings import Updates


@dataclass(frozen=True)
class Whole:
    """Rollouts, one per row. `input_ids` [B, L] is padded at the end and lacks the last column of
    tokens; `predicts_N` are the positions in the flattened `input_ids` whose next token belongs to
    a completion; `prompt_ends_B` is the position of the prompt's last token in each row."""

    input_ids: torch.Tensor
    predicts_N: torch.Tensor
    prompt_ends_B: torch.Tensor

    def predicting(self, states_BLD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [N, D] from which the completion tokens are predicted."""
        return states_BLD.flatten(0, 1).index_select(0, self.predicts_N)


class MicroBatch:
    """The rollouts at `rows` in a step: their groups; their completion tokens, concatenated;
    `row_N`, each token's index into `rows`; and `places_N`, its position in the step's flat arrays.
    The input of the forward pass (`whole`, `shared` or `continued`) is computed lazily."""

    def __init__(self, rollouts: Rollouts, rows: Ints, device: torch.device) -> None:
        self.rows, self.device = rows, device
        groups, completions = rollouts.group_B[rows], rollouts.table["token_ids"][rows]
        _, first, self.owner_B = np.unique(groups, return_index=True, return_inverse=True)
        prompts, targets_N = rollouts.table["prompt"][rows[first]], flat(completions)
        self.prompts = split(flat(prompts), lengths_of(prompts))
        self.lengths_B = lengths_of(completions)
        self.completions = split(targets_N, self.lengths_B)
        self.places_N = rollouts.places(rows)
        self.group_B = self._tensor(groups.copy())  # a view of the table, read-only
        self.row_N = self._tensor(np.repeat(np.arange(len(rows)), self.lengths_B))
        self.targets_N = self._tensor(targets_N)
        logprobs_N = rollouts.logprobs_N[self.places_N]
        self.sampler_logprobs_N = self._tensor(logprobs_N.astype(np.float32))

    @cached_property
    def whole(self) -> Whole:
        """The rollouts, one per row."""
        pairs = zip(self.owner_B, self.completions, strict=True)
        rows = [np.concatenate([self.prompts[owner], completion]) for owner, completion in pairs]
        ids = pad(rows)[:, :-1]
        prompt_ends = np.array([len(prompt) - 1 for prompt in self.prompts])[self.owner_B]
        predicts = spans(np.arange(len(rows)) * ids.shape[1] + prompt_ends, self.lengths_B)
        return Whole(*map(self._tensor, (ids, predicts, prompt_ends)))

    @cached_property
    def shared(self) -> tuple[Packing, torch.Tensor]:
        """The rollouts, packed with each prompt once, and the positions [N] in the packing whose
        next token belongs to a completion, row by row."""
        fed = [completion[:-1] for completion in self.completions]
        packing, prompts, rest = pack(self.prompts, self.owner_B, fed, self.device)
        predicts = spans(rest.starts - 1, self.lengths_B)
        # the prompt's last token predicts the completion's first
        firsts = np.cumsum(self.lengths_B) - self.lengths_B
        predicts[firsts] = (prompts.starts + prompts.lengths - 1)[self.owner_B]
        return packing, self._tensor(predicts)

    @cached_property
    def continued(self) -> tuple[Packing, Packing, torch.Tensor]:
        """For `forward_after`: the prompts without their last tokens, the rollouts from these
        tokens on, and the positions [N] in the latter whose next token belongs to a completion."""
        starts = [prompt[:-1] for prompt in self.prompts]
        fed = [
            np.concatenate([self.prompts[owner][-1:], completion[:-1]])
            for owner, completion in zip(self.owner_B, self.completions, strict=True)
        ]
        packing, _, rest = pack(starts, self.owner_B, fed, self.device)
        firsts = rest.starts - packing.num_prompt_tokens
        return *packing.split(), self._tensor(spans(firsts, self.lengths_B))

    def free(self) -> None:
        """Free the inputs of the forward pass. Clear the attention biases at once: the biases of
        all micro-batches may not fit in memory."""
        made = vars(self)
        for packing in [*made.get("shared", ())[:1], *made.get("continued", ())[:2]]:
            packing.biases.clear()
        for name in ("whole", "shared", "continued"):
            made.pop(name, None)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self.device)


def micro_batches(
    rollouts: Rollouts,
    rows: Ints,
    max_tokens: int,
    device: torch.device,
    *,
    by_group: bool,
) -> list[MicroBatch]:
    """Return `rows` in micro-batches of at most `max_tokens` computed tokens (one row at least),
    the longest first, so that an allocation that will fail does so at once, not hours later.
    `by_group` keeps the rollouts of a prompt together; it counts each prompt once, and no padding
    (see `MicroBatch.shared`). Otherwise rows of similar length share a batch, padded."""
    batches = fill(rollouts, rows, max_tokens, by_group=by_group)
    return [MicroBatch(rollouts, np.array(batch), device) for batch in batches]


def fill(rollouts: Rollouts, rows: Ints, max_tokens: int, *, by_group: bool) -> list[list[int]]:
    """Return the rows of each micro-batch; see `micro_batches`."""
    lengths, groups = rollouts.tokens_B(), rollouts.group_B
    completions, longest = rollouts.completion_tokens_B(), np.zeros_like(rollouts.prompt_rows_Q)
    np.maximum.at(longest, groups[rows], lengths[rows])
    order = sorted(
        rows.tolist(),
        key=lambda row: (*((-longest[groups[row]], groups[row]) * by_group), -lengths[row], row),
    )
    batches: list[list[int]] = []
    used = 0
    for row in order:
        before = batches[-1] if batches else []
        if not by_group:  # padded to the longest
            taken = int(lengths[before[0] if before else row])
        else:  # the prompt is computed if the previous row belongs to another group
            is_read = bool(before) and groups[before[-1]] == groups[row]
            taken = int(completions[row] if is_read else lengths[row])
        if before and used + taken <= max_tokens:
            before.append(row)
            used += taken
        else:
            batches.append([row])
            used = int(lengths[row])
    return batches


def minibatches(rollouts: Rollouts, updates: Updates, rng: np.random.Generator) -> list[Rollouts]:
    """Return the rollouts of every update of a batch, in order. Each epoch shuffles the groups into
    its minibatches, and omits empty ones. A single update uses all rollouts in their order."""
    if not updates.is_several:
        return [rollouts]
    parts = []
    for _ in range(updates.epochs):
        groups = rng.permutation(np.unique(rollouts.group_B))
        shares = (groups[i :: updates.minibatches] for i in range(updates.minibatches))
        parts += [rollouts.where(np.isin(rollouts.group_B, each)) for each in shares if len(each)]
    return parts


def split(values_N: Ints, lengths_B: Ints) -> list[Ints]:
    """Return an array split into consecutive parts of these lengths."""
    return np.split(values_N, np.cumsum(lengths_B)[:-1])


def pad(rows: Sequence[Ints]) -> Ints:
    """Return rows of token ids as [rows, longest], padded with zeros at the end."""
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids
