"""The rows that a decoder has in flight: their keys and values on the device, their tokens and
counts on the host.

Rows occupy the first slots of preallocated arrays, each at its own position, so that no row waits
for another. Compaction removes finished rows. Randomness is a counter-based hash of (seed,
position) per row, so a sample does not depend on the other rows in flight.

Legend: n rows in flight, V vocabulary."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tasks.engines.choosing import choose, hashed_uniforms
from tasks.engines.hf.cache import KeysValues, KVCache, Prefill
from tasks.engines.settings import Sampling
from tasks.models.fused import FusedForward, fits
from tasks.models.packing import Ints, forward, head_logits, pack
from tasks.models.transfer import to_device, to_host


class Slots:
    """Up to `capacity` rows in flight, always in the first `len(rows)` slots, and their tokens so
    far."""

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        longest_prompt: int,
        sampling: Sampling,
        stop_ids: npt.NDArray[Any],
    ) -> None:
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.device = model.device
        positions = longest_prompt + sampling.max_tokens
        fused = FusedForward(model, positions) if fits(model) else None
        self.forward = fused or partial(forward, model)
        self.logits = fused.logits if fused else partial(head_logits, model)
        self.cache = KVCache(capacity, positions)
        self.rows: list[int] = []
        # per slot: the chosen tokens, the uniform numbers to choose them, and the row's progress
        shape = (capacity, sampling.max_tokens)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.logprobs = np.zeros(shape, dtype=np.float32)
        self.uniforms = np.zeros(shape)
        self.position = np.zeros(capacity, dtype=np.int64)
        self.count = np.zeros(capacity, dtype=np.int64)  # tokens, including earlier calls
        self.first = np.zeros(capacity, dtype=np.int64)  # the first token of this call
        self.stopped = np.zeros(capacity, dtype=np.bool_)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefill:
        """Return the keys, values and last logits of `prompts`, computed in one forward."""
        packing, segments, _ = pack(prompts, np.zeros(0, dtype=np.int64), [], self.device)
        states: list[KeysValues] = []

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
        ) -> torch.Tensor:
            states.append((key, value))
            return packing.attend(layer, query, key, value, *rest)

        hidden = self.forward(packing.ids, packing.positions, attend)
        # the first completion token is chosen from the logits of each prompt's last token
        ends = to_device(segments.starts + segments.lengths - 1, self.device)
        return Prefill(states, segments, self.logits(hidden.index_select(0, ends)))

    def start(
        self, rows: list[int], seeds: list[int], written: Ints, prefill: Prefill, owners: Ints
    ) -> None:
        """Start `rows[i]` in the i-th free slot, after prompt `owners[i]` of `prefill`, and choose
        its next token. The prompt already includes the first `written[i]` tokens of the row."""
        first = len(self.rows)
        slots = slice(first, first + len(rows))
        self.cache.fill(first, prefill, owners)
        self.rows += rows
        self.position[slots] = prefill.segments.lengths[owners]
        self.count[slots] = self.first[slots] = written
        self.uniforms[slots] = hashed_uniforms(seeds, self.sampling.max_tokens)
        self.choose_tokens(slots, prefill.logits.index_select(0, to_device(owners, self.device)))

    def step(self) -> None:
        """Decode one token for every row in flight."""
        active = len(self.rows)
        # feed each row's latest token at its own position; the cache stores its key and value
        latest = self.tokens[np.arange(active), self.count[:active] - 1]
        ids = to_device(latest, self.device)
        positions = to_device(self.position[:active].copy(), self.device)
        self.cache.start_step(positions, int(self.position[:active].max()) + 1)
        hidden = self.forward(ids, positions, self.cache.attend)
        self.position[:active] += 1
        self.choose_tokens(slice(0, active), self.logits(hidden))

    def choose_tokens(self, rows: slice, logits: torch.Tensor) -> None:
        """Choose one token per row from `logits` [n, V], by inverse-CDF sampling with the row's own
        uniform random number."""
        slots = np.arange(rows.start, rows.stop)
        count = self.count[rows]
        uniforms = to_device(self.uniforms[slots, count], logits.device)
        # the only synchronization of host and device in a step
        chosen, logprobs = to_host(choose(logits, uniforms[:, None], self.sampling))
        tokens = chosen[:, 0].numpy()
        self.tokens[slots, count] = tokens
        self.logprobs[slots, count] = logprobs[:, 0].numpy()
        self.count[rows] += 1
        self.stopped[rows] = (tokens[:, None] == self.stop_ids).any(1)

    def collect(self) -> list[tuple[int, list[int], list[float], bool]]:
        """Remove the rows that have ended, and close the gaps. Return (row, tokens, logprobs,
        stopped) for each removed row."""
        active = len(self.rows)
        ended = self.stopped[:active] | (self.count[:active] >= self.sampling.max_tokens)
        finished = [self.written(slot) for slot in np.flatnonzero(ended).tolist()]
        if finished:
            self.compact(np.flatnonzero(~ended))
        return finished

    def written(self, slot: int) -> tuple[int, list[int], list[float], bool]:
        """Return (row, tokens, logprobs, stopped) of a slot; the tokens are those of this call."""
        own = slice(self.first[slot], self.count[slot])
        tokens, logprobs = self.tokens[slot, own].tolist(), self.logprobs[slot, own].tolist()
        return self.rows[slot], tokens, logprobs, bool(self.stopped[slot])

    def compact(self, kept: Ints) -> None:
        """Keep only the slots `kept`. Move rows from the end into the gaps; the other rows do not
        move."""
        active = len(self.rows)
        remaining = len(kept)
        gaps = np.setdiff1d(np.arange(remaining), kept)
        movers = kept[kept >= remaining]
        if len(gaps):
            for state in (
                self.tokens,
                self.logprobs,
                self.uniforms,
                self.position,
                self.count,
                self.first,
                self.stopped,
            ):
                state[gaps] = state[movers]
            self.cache.move(gaps, movers, int(self.position[:active].max()))
        for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
            self.rows[gap] = self.rows[mover]
        del self.rows[remaining:]
