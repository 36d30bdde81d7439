"""The engine contract: sample completions of prompts reproducibly, and replace the policy's weights
in place.

An engine is a file or folder in `engines/`, and is named after it. All engines pass the same
contract suite. A seed belongs to a completion, not to a batch: a completion depends on the policy,
the prompt, the sampling settings and its own seed. It does not depend on the other completions of
the call or their order. In float32 this holds up to the rounding of matmuls."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from tasks.common.files import ArtifactError
from tasks.engines.settings import Sampling

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """`counts[i]` completions of `prompts[i]` (token ids), with one seed per completion in order.

    If `with_logprobs` is false, the lists of log-probabilities may be empty: vLLM is faster without
    them. The last `written[i]` tokens of `prompts[i]` (0 if None) belong to the completion: an
    earlier call sampled them before it was stopped. They count towards `sampling.max_tokens`."""

    prompts: Sequence[Sequence[int]]
    counts: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling
    with_logprobs: bool = True
    written: Sequence[int] | None = None

    def owner_B(self) -> Ints:
        """Return the prompt's index for each of the B completions."""
        return np.repeat(np.arange(len(self.prompts)), self.counts)

    def written_B(self) -> Ints:
        """Return the number of tokens that earlier calls sampled for each of the B completions."""
        if self.written is None:
            return np.zeros(sum(self.counts), dtype=np.int64)
        return np.repeat(np.asarray(self.written, dtype=np.int64), self.counts)

    def own_seeds(self) -> list[int]:
        """Return one seed per completion, for an engine that restarts its random numbers in every
        call. A completion that continues must not reuse the random numbers of its first tokens."""
        return [
            sample_seed("go on", seed, written) if written else seed
            for seed, written in zip(self.seeds, self.written_B().tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Samples:
    """B completions in the order of the request: those of a prompt are consecutive.

    The finish reason "stop" means that `token_ids` end with the stop token, "length" that the
    completion was cut at the limit, and "abort" (of `StoppableEngine`) that the call was stopped
    before the completion ended. `logprobs` are under the sampling distribution: after temperature,
    renormalised over top-p and top-k.

    If an environment wrote some tokens, `is_action` marks the policy's own tokens, and the others
    have log-probability 0. None means that all tokens are the policy's. If weights may have been
    swapped midway, `versions` contains the policy's version per token."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    is_action: list[list[bool]] | None = None
    versions: list[list[int]] | None = None


class Unavailable(Exception):
    """Raised if a server did not respond, or rejected a request temporarily. A retry there or at
    another server may succeed."""


class NoServerError(ArtifactError):
    """Raised if all sampling servers have failed too often."""


async def attempt(request: Awaitable[T]) -> T | str:
    """Return the result of `request`, or the text of the Unavailable or ArtifactError it raises."""
    try:
        return await request
    except (Unavailable, ArtifactError) as error:
        return str(error)


OnEnded = Callable[[int, Sequence[int], str], object]
IsEnough = Callable[[int, Sequence[int], str], bool]


class Engine(Protocol):
    """An engine, which samples completions. `prefix_block` is the number of tokens in a block of
    the prefix cache: the completions of a prompt share the whole blocks of its prefill.
    `shares_weights` is true for an engine that samples from the trainer's own memory: its weights
    are never stale."""

    name: str
    version: str
    prefix_block: int
    shares_weights: bool

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Samples:
        """Return the completions of `request`.

        The engine calls `on_ended(row, token_ids, finish_reason)` when a completion ends, so that
        callers can show progress and grade the completion at once. Raise ArtifactError, with the
        prompt's index, if a prompt is empty or leaves no room for `sampling.max_tokens`."""
        ...

    def set_weights(self, weights: Mapping[str, "torch.Tensor"]) -> None:
        """Replace the policy's weights in place. The next call uses the new weights."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the engine's metrics for the tracker; an empty dict if it has no servers."""
        return {}

    def sleep(self) -> None:
        """Free the engine's memory for the trainer until the next use of the engine. An engine
        without its own memory does nothing."""
        return


@runtime_checkable
class ScheduledEngine(Engine, Protocol):
    """An engine that lets its caller set the order in which completions start, and the number in
    flight. vLLM decides both itself."""

    def cache_bytes(self, positions: int) -> int:
        """Return the size in bytes of the KV cache of one row of `positions` tokens."""
        ...

    def generate_in_order(self, request: Request, order_B: Ints, max_rows: int) -> Samples:
        """Return the completions of `request`, with at most `max_rows` in flight.

        Completions start in the order of the indices `order_B`; when one ends, the next takes its
        slot at once. The order affects no completion. Samples are in the order of the request."""
        ...


@runtime_checkable
class StoppableEngine(Engine, Protocol):
    """An engine whose caller may stop all completions when one of them has ended."""

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Samples:
        return self.generate_until(request, never(on_ended))

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        """Return completions as `generate` does, but call `is_enough` instead of `on_ended`. Once
        it returns True, the other completions end with the finish reason "abort" and their tokens
        so far, possibly none."""
        ...


@runtime_checkable
class SwappingEngine(Engine, Protocol):
    """An engine whose weights can be replaced while it samples."""

    def set_weights(
        self, weights: Mapping[str, "torch.Tensor"], version: int | None = None
    ) -> None:
        """Replace the weights as `Engine` does. `version` is the number of policy updates so far.
        If it is given, later samples contain `versions`."""
        ...

    def swap_weights(self, weights: Mapping[str, "torch.Tensor"], version: int) -> None:
        """Replace the weights as `set_weights` does, while another thread may be in `generate`.
        Completions in flight continue with the new weights. The log-probability of a token is under
        the weights that sampled it, given all tokens before it."""
        ...


def never(on_ended: OnEnded | None) -> IsEnough:
    """Return an `is_enough` that calls `on_ended` and never stops the other completions."""

    def is_enough(row: int, token_ids: Sequence[int], reason: str) -> bool:
        if on_ended:
            on_ended(row, token_ids, reason)
        return False

    return is_enough


def check_lengths(request: Request, max_length: int) -> None:
    """Raise ArtifactError, with the prompt's index, if a prompt is empty, or if prompt and
    completion can exceed `max_length` tokens together."""
    max_tokens = request.sampling.max_tokens
    written = request.written or [0] * len(request.prompts)
    for index, (prompt, of_completion) in enumerate(zip(request.prompts, written, strict=True)):
        length = len(prompt) - of_completion
        if length < 1:
            raise ArtifactError(
                f"prompt {index} has no tokens, and a completion needs at least one: drop the "
                "prompt"
            )
        if length + max_tokens > max_length:
            raise ArtifactError(
                f"prompt {index} has {length} tokens, and with sampling.max_tokens "
                f"{max_tokens} that is over the context of {max_length} (the policy's, or "
                "engine.vllm.max_model_len): drop the prompt or lower sampling.max_tokens"
            )


def check_for_vllm(request: Request, max_length: int) -> None:
    """Call `check_lengths`. Raise ArtifactError for a temperature that vLLM refuses or changes."""
    temperature = request.sampling.temperature
    if temperature and not 0.01 <= temperature <= 2.0:
        raise ArtifactError(
            f"sampling.temperature is {temperature:g}, but vLLM supports 0, and 0.01 to 2: change "
            "it, or set engine.name to hf"
        )
    check_lengths(request, max_length)


def sample_seed(*parts: Any) -> int:
    """Return a 63-bit seed, equal on all machines, from the parts that identify a completion."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
