"""The KV cache: keys and values of prompts after their prefill, and of every row in flight.

Legend: n rows in flight, N prompt tokens of a prefill, H query heads, K key-value heads, D size of
a head, V vocabulary."""

from dataclasses import dataclass

import numpy as np
import torch

from tasks.models.packing import Ints, Segments, causal_bias, gather
from tasks.models.transfer import to_device

# one layer's keys and values
KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Prefill:
    """The result of one forward over some prompts: each layer's keys and values [N, K, D], the
    segment of each prompt in them, and the logits [prompts, V] after each prompt's last token."""

    states: list[KeysValues]
    segments: Segments
    logits: torch.Tensor

    def select(self, prompts: Ints) -> "Prefill":
        """Return a copy for these prompt indices; the other prompts' memory can then be freed."""
        lengths = self.segments.lengths[prompts]
        starts = self.segments.starts[prompts]
        tokens = np.concatenate(
            [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
        )
        rows = to_device(tokens, self.logits.device)
        chosen = to_device(prompts, self.logits.device)
        states = [
            (keys.index_select(0, rows), values.index_select(0, rows))
            for keys, values in self.states
        ]
        segments = Segments(np.cumsum(lengths) - lengths, lengths)
        return Prefill(states, segments, self.logits.index_select(0, chosen))


class KVCache:
    """Keys and values of every layer, [capacity, K, length, D]; each row writes at its own
    position.

    The first `fill` allocates the arrays, with the K, D and dtype of its prefill."""

    def __init__(self, capacity: int, length: int) -> None:
        self.capacity = capacity
        self.length = length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        # of the current step: positions [n], slots [n], and the number of attended positions
        self.positions = torch.empty(0)
        self.slots = torch.empty(0)
        self.span = 0
        self.biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def fill(self, first: int, prefill: Prefill, owners: Ints) -> None:
        """Copy the keys and values of prompt `owners[i]` into slot `first + i`.

        Pad shorter prompts by repeating their last token: these positions are overwritten before
        any token attends to them."""
        indices, _ = prefill.segments.padded_indices(owners)  # [rows, longest prompt]
        places = to_device(indices, prefill.logits.device)
        slots = slice(first, first + len(owners))
        for layer, pair in enumerate(prefill.states):
            for cached, new in zip((self.keys, self.values), pair, strict=True):
                if layer == len(cached):
                    shape = (self.capacity, new.shape[1], self.length, new.shape[2])
                    cached.append(new.new_zeros(shape))
                # [N, K, D] -> [rows, K, longest prompt, D]
                cached[layer][slots, :, : indices.shape[1]] = gather(new, places)

    def move(self, target: Ints, source: Ints, length: int) -> None:
        """Copy the first `length` positions of the slots `source` to the slots `target`."""
        device = self.keys[0].device
        to = to_device(target, device)
        of = to_device(source, device)
        for states in (*self.keys, *self.values):
            states[to, :, :length] = states[of, :, :length]

    def start_step(self, positions: torch.Tensor, span: int) -> None:
        """Begin a step: row i writes at `positions[i]`; `span` is the largest position plus one."""
        self.positions = positions
        self.slots = torch.arange(len(positions), device=positions.device)
        self.span = span
        self.biases = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store the key and value of each row's new token. Return the attention [n, H, D] of each
        new token to itself and the tokens before it; see `packing.Attend`."""
        num_rows, heads = query.shape[:2]
        self.keys[layer][self.slots, :, self.positions] = key
        self.values[layer][self.slots, :, self.positions] = value
        keys = self.keys[layer][:num_rows, :, : self.span]
        values = self.values[layer][:num_rows, :, : self.span]
        bias = self.bias(window, query.dtype)
        if query.dtype != torch.float32 and query.device.type != "cpu":
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, None],
                keys,
                values,
                bias,
                scale=scaling,
                enable_gqa=heads != keys.shape[1],
            )
            return attended[:, :, 0]
        # With one query per row, plain matmuls are faster than the fused kernels of float32 and of
        # CPUs, which are made for many queries. Group queries by their key-value head:
        # [n, K, H / K, D].
        grouped = query.reshape(num_rows, keys.shape[1], -1, query.shape[2])
        scores = torch.matmul(grouped, keys.transpose(2, 3)).mul_(scaling).add_(bias)
        shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        return torch.matmul(shares, values).reshape(num_rows, heads, -1)

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask [n, 1, 1, span] to add to the scores. All layers with the same window and
        dtype share it for a step."""
        if (window, dtype) not in self.biases:
            key = torch.arange(self.span, device=self.positions.device)
            bias = causal_bias(self.positions[:, None], key, window, dtype)
            self.biases[window, dtype] = bias[:, None, None]
        return self.biases[window, dtype]
