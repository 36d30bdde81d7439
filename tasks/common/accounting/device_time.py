"""Modelled seconds on a GPU: the time of a run's rollouts for a named policy and device.

FLOPs overstate the savings in updates and hide the savings in generation, because decoding is bound
by memory, not arithmetic. This model estimates the time of the same rollouts on the device:

- a decoding step of b rollouts with S tokens of context in total reads the weights and the KV cache
  once: t0 + (2 Pw + kv S) / (e BW) + 2 Pw b / (ec F);
- prefill and scoring take (2 P + 2 L d s) / (0.5 F) per token of a sequence of length s; an update
  has three times these FLOPs, with MFU in place of 0.5.

Its constants come from published measurements. Compared with a sweep on an A100, its error is 6 %
on average and 20 % at most for up to 32 rollouts; for 48 and for 64 it is 50 %. So the benchmark
also counts scoring and updates at half and at double their modelled time.

Legend: B rollouts, P parameters, Pw parameters read per step (all but an untied input embedding), L
layers, d width, BW bytes and F FLOPs a second at their peaks, e and ec the shares of these that
decoding reaches, t0 a step's fixed seconds, kv bytes of KV cache per token."""

import heapq
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BANDWIDTH_SHARE = 0.74  # of the peak, reached when reading weights
DECODE_SHARE = 0.8  # of the peak FLOPs, in a step's matmuls
PREFILL_SHARE = 0.5
MFU = 0.4  # of an update, on the basis of 6 P a token
MEMORY_SHARE = 0.85  # of the device's memory, for weights and cache


@dataclass(frozen=True)
class Device:
    """A GPU: its peak bandwidth in bytes per second, its peak bfloat16 FLOPs per second, its memory
    in bytes, and the fixed time of a decoding step in seconds."""

    name: str
    bandwidth: float
    flops: float
    memory: float
    overhead: float


@dataclass(frozen=True)
class Model:
    """A policy in bfloat16: parameters, parameters read per step, bytes of KV cache per token,
    layers, width."""

    name: str
    parameters: float
    streamed: float
    cache_bytes: float
    layers: int
    width: int


A100 = Device("A100", 2.039e12, 312e12, 80e9, 0.0)
H100 = Device("H100", 3.35e12, 989e12, 80e9, 1e-3)
H200 = Device("H200", 4.8e12, 989e12, 141e9, 1e-3)
SMALL = Model("1.5B", 1.543e9, 1.543e9, 28_672, 28, 1536)
LARGE = Model("7B", 7.615e9, 7.07e9, 57_344, 28, 3584)


@dataclass(frozen=True)
class Seconds:
    """Modelled seconds of each phase of a run."""

    decode: float = 0.0
    prefill: float = 0.0
    score: float = 0.0
    update: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class DeviceTime:
    """The modelled times of decoding, prefill, scoring and updates of one policy on one device."""

    model: Model = LARGE
    device: Device = H100

    def steps(self, num: int, rows: float, context: float) -> float:
        """Return the seconds of `num` decoding steps; each adds `rows` tokens to `context`."""
        model, device = self.model, self.device
        held = num * context + rows * num * (num - 1) / 2.0
        read = 2.0 * model.streamed * num + model.cache_bytes * held
        return (
            num * device.overhead
            + read / (BANDWIDTH_SHARE * device.bandwidth)
            + num * 2.0 * model.streamed * rows / (DECODE_SHARE * device.flops)
        )

    def max_rows(self, tokens: float) -> int:
        """Return how many rollouts of `tokens` tokens fit beside the weights; at least 1."""
        free = MEMORY_SHARE * self.device.memory - 2.0 * self.model.parameters
        return max(int(free / (self.model.cache_bytes * max(tokens, 1.0))), 1)

    def wave(self, prompt_tokens: Ints, completion_tokens: Ints, max_rows: int) -> float:
        """Return the seconds to decode all rollouts, at most `max_rows` at once. When one finishes,
        the next in the given order starts. The tail, when few rollouts are left, is included.

        The arrays are [B]."""
        waiting = list(zip(completion_tokens.tolist(), prompt_tokens.tolist(), strict=True))[::-1]
        in_flight: list[tuple[int, int]] = []  # (last step, tokens at its end)
        now, context, seconds = 0, 0.0, 0.0
        while waiting or in_flight:
            while waiting and len(in_flight) < max_rows:
                length, prompt = waiting.pop()
                heapq.heappush(in_flight, (now + max(length, 1), prompt + max(length, 1)))
                context += prompt
            num = in_flight[0][0] - now
            seconds += self.steps(num, len(in_flight), context)
            now, context = now + num, context + num * len(in_flight)
            while in_flight and in_flight[0][0] == now:
                context -= heapq.heappop(in_flight)[1]
        return seconds

    def read(self, tokens: Sequence[float] | Ints) -> float:
        """Return the seconds to prefill or score sequences of these lengths in tokens."""
        return float(self.forward_flops(tokens) / (PREFILL_SHARE * self.device.flops))

    def update(self, tokens: Sequence[float] | Ints) -> float:
        """Return the seconds of a forward and backward pass over sequences of these lengths."""
        return float(3.0 * self.forward_flops(tokens) / (MFU * self.device.flops))

    def forward_flops(self, tokens: Sequence[float] | Ints) -> float:
        """Return the FLOPs of a forward pass: 2 P + 2 L d s per token of a sequence of length s."""
        lengths, model = np.asarray(tokens, dtype=np.float64), self.model
        attention = 2.0 * model.layers * model.width * lengths
        return float((lengths * (2.0 * model.parameters + attention)).sum())
