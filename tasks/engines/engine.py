"""The engine contract: sample completions of prompts reproducibly, and replace the policy's weights
in place.

An engine is one file or folder in `engines/`; its name is the file's. All engines pass one contract
suite. A seed belongs to a completion, not to a batch: a completion depends on the policy, the
prompt, the sampling settings and its own seed, and not on the other completions of the call or
their order (in float32 exactly, up to the rounding of matrix products)."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tasks.common.files import ArtifactError
from tasks.engines.settings import Sampling

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """`counts[i]` completions of `prompts[i]` (token ids), one seed a completion in that order.

    With `with_logprobs` false the lists of log-probabilities may be empty: vLLM is faster without
    them. The last `written[i]` tokens of `prompts[i]` are the completion's own, of an earlier call
    that was stopped: they count towards `sampling.max_tokens`; None: nothing was written."""

    prompts: Sequence[Sequence[int]]
    counts: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling
    with_logprobs: bool = True
    written: Sequence[int] | None = None

    def owner_B(self) -> Ints:
        """The index of the prompt that each of the B completions belongs to."""
        return np.repeat(np.arange(len(self.prompts)), self.counts)

    def written_B(self) -> Ints:
        """How many tokens of each of the B completions were written before."""
        if self.written is None:
            return np.zeros(sum(self.counts), dtype=np.int64)
        return np.repeat(np.asarray(self.written, dtype=np.int64), self.counts)

    def own_seeds(self) -> list[int]:
        """A seed a completion for an engine whose random numbers begin anew with every call: one
        that goes on must not get those of its beginning again."""
        return [
            sample_seed("go on", seed, written) if written else seed
            for seed, written in zip(self.seeds, self.written_B().tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Samples:
    """B completions in the order of the request, the completions of a prompt side by side.

    `token_ids` end with the stop token when `finish_reasons` is "stop"; "length" means the
    completion was cut at the limit, and "abort" (of `StoppableEngine`) that the call was stopped
    before its end. `logprobs` are those of the distribution sampled from:
    temperature applied, top-p and top-k renormalised.

    Where an environment wrote tokens of a completion, `is_action` says which are the policy's own,
    and the log-probabilities of the others are 0; None: all are. Where weights may have been
    swapped in the middle, `versions` has that of the policy behind each token."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    is_action: list[list[bool]] | None = None
    versions: list[list[int]] | None = None


class Unavailable(Exception):
    """A server did not answer, or asked to try again later. Another server, or the same one later,
    may answer."""


class NoServerError(ArtifactError):
    """Every server that samples has failed too often."""


OnEnded = Callable[[int, Sequence[int], str], object]
IsEnough = Callable[[int, Sequence[int], str], bool]


class Engine(Protocol):
    """Samples completions. `prefix_block` is the number of tokens in a block of the prefix cache,
    in whole blocks of which the completions of a prompt share its prefill. `prefilled_tokens`
    counts the prompt tokens that were really computed, not those found in a cache.
    `shares_weights` says that it samples from the trainer's own memory and cannot be stale."""

    name: str
    version: str
    prefix_block: int
    prefilled_tokens: int
    shares_weights: bool

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Samples:
        """Return the completions that `request` asks for.

        `on_ended(row, token_ids, finish_reason)` is called as each completion ends: for progress
        bars, and for graders that need not wait for the last. Raises ArtifactError naming the index
        of a prompt that leaves no room for `sampling.max_tokens`.
        """
        ...

    def set_weights(self, weights: Mapping[str, "torch.Tensor"]) -> None:
        """Replace the policy's weights in place, with effect from the next call on."""
        ...

    def sleep(self) -> None:
        """Free the engine's memory for the trainer until the engine is used again. An engine
        without memory of its own does nothing."""
        ...


@runtime_checkable
class ScheduledEngine(Engine, Protocol):
    """An engine that lets its caller decide which completions start first and how many are in
    flight. vLLM decides both itself."""

    def cache_bytes(self, positions: int) -> int:
        """Bytes of the keys and values of one row of `positions` tokens."""
        ...

    def generate_in_order(
        self,
        request: Request,
        order_B: Ints,
        max_rows: int,
        on_ended: OnEnded | None = None,
    ) -> Samples:
        """Return the completions that `request` asks for, with at most `max_rows` in flight.

        Completions start in the order `order_B`; when one ends, the next takes its slot at once.
        The order changes no completion, and the samples come back in the order of the request."""
        ...


@runtime_checkable
class StoppableEngine(Engine, Protocol):
    """An engine whose caller may stop it when a completion has ended."""

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        """As `generate`, with `is_enough` called as `on_ended` is. Once it returns True the others
        end, too, with the finish reason "abort" and the tokens that they have so far, maybe
        none."""
        ...


@runtime_checkable
class SwappingEngine(Engine, Protocol):
    """An engine whose weights can be replaced while it samples."""

    def set_weights(
        self, weights: Mapping[str, "torch.Tensor"], version: int | None = None
    ) -> None:
        """As `Engine`. With the `version` of the policy, the number of its updates, samples have
        `versions` from now on."""
        ...

    def swap_weights(self, weights: Mapping[str, "torch.Tensor"], version: int) -> None:
        """As `set_weights`, while another thread may be in `generate`: completions in flight go on
        with the new weights. The log-probability of a token is that of the weights that wrote it,
        given all tokens before it."""
        ...


def never(on_ended: OnEnded | None) -> IsEnough:
    """What tells `on_ended` of every completion, and is never enough."""

    def is_enough(row: int, token_ids: Sequence[int], reason: str) -> bool:
        if on_ended:
            on_ended(row, token_ids, reason)
        return False

    return is_enough


def check_lengths(request: Request, max_length: int) -> None:
    """Raise ArtifactError naming the first prompt that is empty, or that does not fit the policy's
    context together with its completion."""
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
                f"{max_tokens} that is over the policy's context of {max_length}: drop the prompt "
                "or lower sampling.max_tokens"
            )


def sample_seed(*parts: Any) -> int:
    """Return a 63-bit seed from the parts that name a completion: the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
