"""The rows that a decoder has in flight: their keys and values on the device, their tokens and
counts on the host.

Rows live in the first slots of preallocated arrays, each at its own position, so that no row waits
for another; finished rows are compacted away. Randomness is a counter-based hash of (seed,
position) per row, so a sample does not depend on which rows decode beside it.

Legend: n rows in flight, N tokens of the prompts being read, H query heads, K key-value heads, D
size of a head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tasks.engines.choosing import choose, hashed_uniforms
from tasks.engines.engine import Sampling
from tasks.models.fused import FusedForward, fits
from tasks.models.packing import Ints, ModuleForward, Places, pack


class Slots:
    """Up to `capacity` rows in flight, always the first `len(rows)` slots, and what each has
    produced so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        longest_prompt: int,
        sampling: Sampling,
        stop_ids: npt.NDArray[Any],
    ) -> None:
        self.capacity, self.sampling, self.stop_ids, self.device = (
            capacity,
            sampling,
            stop_ids,
            model.device,
        )
        positions = longest_prompt + sampling.max_tokens
        self.forward = FusedForward(model, positions) if fits(model) else ModuleForward(model)
        self.rows: list[int] = []
        self.memory = Memory(capacity, positions)
        shape = (capacity, sampling.max_tokens)
        self.tokens, self.logprobs = (
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape, dtype=np.float32),
        )
        self.uniforms = np.zeros(shape)
        self.position, self.count = (
            np.zeros(capacity, dtype=np.int64),
            np.zeros(capacity, dtype=np.int64),
        )
        self.stopped = np.zeros(capacity, dtype=np.bool_)

    def read(self, prompts: Sequence[Sequence[int]]) -> "Reading":
        """Read each of `prompts` once, all in one forward."""
        packing, places, _ = pack(prompts, np.zeros(0, dtype=np.int64), [], self.device)
        states: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
        ) -> torch.Tensor:
            states.append((key, value))
            return packing.attend(layer, query, key, value, *rest)

        hidden = self.forward(packing.ids, packing.positions, attend)
        ends = torch.from_numpy(places.starts + places.lengths - 1).to(self.device)
        return Reading(states, places, self.forward.logits(hidden.index_select(0, ends)))

    def start(self, rows: list[int], seeds: list[int], reading: "Reading", owners: Ints) -> None:
        """Start row i after prompt `owners[i]` of the reading, in the next free slot."""
        first, last = len(self.rows), len(self.rows) + len(rows)
        self.memory.fill(first, reading.states, reading.places, owners)
        self.rows += rows
        self.position[first:last], self.count[first:last] = reading.places.lengths[owners], 0
        self.uniforms[first:last] = hashed_uniforms(seeds, self.sampling.max_tokens)
        self.draw(
            slice(first, last),
            reading.logits.index_select(0, torch.from_numpy(owners).to(self.device)),
        )

    def step(self) -> None:
        """One token for every row in flight."""
        active = len(self.rows)
        last = self.tokens[np.arange(active), self.count[:active] - 1]
        ids, positions = (
            torch.from_numpy(a).to(self.device) for a in (last, self.position[:active].copy())
        )
        self.memory.place(positions, int(self.position[:active].max()) + 1)
        hidden = self.forward(ids, positions, self.memory.attend)
        self.position[:active] += 1
        self.draw(slice(0, active), self.forward.logits(hidden))

    def draw(self, rows: slice, logits: torch.Tensor) -> None:
        """Sample one token a row by inverting the distribution function at the row's own uniform
        number."""
        slots, count = np.arange(rows.start, rows.stop), self.count[rows]
        uniforms = torch.from_numpy(self.uniforms[slots, count]).to(logits.device)
        chosen, logprobs = choose(logits, uniforms[:, None], self.sampling)
        tokens = chosen[:, 0].cpu().numpy()
        self.tokens[slots, count], self.logprobs[slots, count] = (
            tokens,
            logprobs[:, 0].cpu().numpy(),
        )
        self.count[rows] += 1
        self.stopped[rows] = (tokens[:, None] == self.stop_ids).any(1)

    def collect(self) -> list[tuple[int, list[int], list[float], bool]]:
        """Take out the rows that ended, (row, tokens, logprobs, stopped) each, and close the gaps
        they leave."""
        active = len(self.rows)
        ended = self.stopped[:active] | (self.count[:active] >= self.sampling.max_tokens)
        finished = []
        for slot in np.flatnonzero(ended).tolist():
            tokens, logprobs = (
                array[slot, : self.count[slot]].tolist() for array in (self.tokens, self.logprobs)
            )
            finished.append((self.rows[slot], tokens, logprobs, bool(self.stopped[slot])))
        if finished:
            self.compact(np.flatnonzero(~ended))
        return finished

    def compact(self, kept: Ints) -> None:
        """Keep the slots `kept` only: rows from the end move into the gaps, the others stay where
        they are."""
        active, remaining = len(self.rows), len(kept)
        gaps, movers = np.setdiff1d(np.arange(remaining), kept), kept[kept >= remaining]
        if len(gaps):
            for state in (
                self.tokens,
                self.logprobs,
                self.uniforms,
                self.position,
                self.count,
                self.stopped,
            ):
                state[gaps] = state[movers]
            self.memory.move(gaps, movers, int(self.position[:active].max()))
        for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
            self.rows[gap] = self.rows[mover]
        del self.rows[remaining:]


@dataclass(frozen=True)
class Reading:
    """Prompts that were read: each layer's keys and values [N, K, D], where they lie, and logits
    [prompts, V]."""

    states: list[tuple[torch.Tensor, torch.Tensor]]
    places: Places
    logits: torch.Tensor

    def only(self, prompts: Ints) -> "Reading":
        """A copy of what some of the prompts need, so that the others' memory can go."""
        lengths = self.places.lengths[prompts]
        at = np.concatenate(
            [
                start + np.arange(n)
                for start, n in zip(self.places.starts[prompts], lengths, strict=True)
            ]
        )
        rows, chosen = (torch.from_numpy(index).to(self.logits.device) for index in (at, prompts))
        states = [
            (keys.index_select(0, rows), values.index_select(0, rows))
            for keys, values in self.states
        ]
        return Reading(
            states,
            Places(np.cumsum(lengths) - lengths, lengths),
            self.logits.index_select(0, chosen),
        )

    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(states.nbytes for pair in self.states for states in pair)


class Memory:
    """Keys and values of every layer, [capacity, K, positions, D], in which every row stands at its
    own position."""

    def __init__(self, capacity: int, length: int) -> None:
        self.capacity, self.length = capacity, length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.positions, self.slots, self.span = torch.empty(0), torch.empty(0), 0
        self.biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def fill(
        self,
        first: int,
        states: list[tuple[torch.Tensor, torch.Tensor]],
        prompts: Places,
        owners: Ints,
    ) -> None:
        """Copy what each layer made of prompt `owners[i]`, keys and values [N, K, D], into slot
        `first + i`.

        Behind a shorter prompt its last token is repeated: those positions are written before they
        are attended to."""
        places, _ = prompts.of(owners)
        flat = torch.from_numpy(places).flatten().to(states[0][0].device)
        rows = slice(first, first + len(owners))
        for layer, pair in enumerate(states):
            for mine, new in zip((self.keys, self.values), pair, strict=True):
                if layer == len(mine):
                    mine.append(
                        new.new_zeros((self.capacity, new.shape[1], self.length, new.shape[2]))
                    )
                copies = (
                    new.reshape(len(new), -1)
                    .index_select(0, flat)
                    .view(*places.shape, *new.shape[1:])
                )
                mine[layer][rows, :, : places.shape[1]] = copies.transpose(1, 2)

    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(states.nbytes for states in (*self.keys, *self.values))

    def move(self, target: Ints, source: Ints, length: int) -> None:
        """Copy the first `length` positions of the slots `source` to the slots `target`."""
        to, of = (torch.from_numpy(slots).to(self.keys[0].device) for slots in (target, source))
        for states in (*self.keys, *self.values):
            states[to, :, :length] = states[of, :, :length]

    def place(self, positions: torch.Tensor, span: int) -> None:
        """Say where the next keys and values go, a position a row, and how many positions are
        attended to at most."""
        self.positions, self.span, self.biases = positions, span, {}
        self.slots = torch.arange(len(positions), device=positions.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """[n, H, D] attention of one token a row to all before it; see `packing.Attend`."""
        num_rows, heads = query.shape[:2]
        self.keys[layer][self.slots, :, self.positions] = key
        self.values[layer][self.slots, :, self.positions] = value
        keys, values = (
            states[layer][:num_rows, :, : self.span] for states in (self.keys, self.values)
        )
        bias = self.bias(window, query.dtype)
        if query.dtype != torch.float32:
            return torch.nn.functional.scaled_dot_product_attention(
                query[:, :, None],
                keys,
                values,
                bias,
                scale=scaling,
                enable_gqa=heads != keys.shape[1],
            )[:, :, 0]
        # one query a row: plain products are quicker than the fused kernels, which are made for
        # many
        grouped = query.reshape(num_rows, keys.shape[1], -1, query.shape[2])
        scores = torch.matmul(grouped, keys.transpose(2, 3)).mul_(scaling).add_(bias)
        return torch.matmul(scores.softmax(-1), values).reshape(num_rows, heads, -1)

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[n, 1, 1, span] what is added to the scores, the same for every layer of a step."""
        if (window, dtype) not in self.biases:
            key, query = (
                torch.arange(self.span, device=self.positions.device),
                self.positions[:, None],
            )
            hidden = (key > query) if window is None else (key > query) | (key <= query - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.biases[window, dtype] = zeros.masked_fill_(hidden, torch.finfo(dtype).min)[
                :, None, None
            ]
        return self.biases[window, dtype]
