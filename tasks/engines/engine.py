"""What an engine is: it draws completions for prompts, reproducibly, and takes new weights in
place.

An engine is one file in `engines/`; its name is the file's. All of them pass one contract suite.
Seeds belong to samples, not to batches: a completion depends on the policy, the prompt, the
sampling settings and its own seed, whatever was drawn beside it and in whatever order (exactly so
in float32, up to the rounding of matrix products)."""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tasks import engines
from tasks.common import registry
from tasks.common.files import ArtifactError
from tasks.common.ledger import Architecture, decode_flops, prefill_flops
from tasks.common.params import ParamsError
from tasks.engines.memory import check_memory
from tasks.models.policy import Policy

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """The section `sampling`: what a sample depends on. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class EngineSettings:
    """The section `engine`: how samples are drawn; none of it enters a key of the rollout store.

    `urls`, `num_replicas`, `max_retries` and `timeout_seconds` (of one request) are of the engine
    `server`."""

    name: str
    device: str
    dtype: str
    max_rows: int
    memory_fraction: float
    sleep: bool
    threads: int
    num_processes: int
    urls: list[str]
    num_replicas: int
    max_retries: int
    timeout_seconds: float


@dataclass(frozen=True)
class Request:
    """`counts[i]` completions of `prompts[i]` (token ids), one seed a completion in that order.

    Whoever does not need log-probabilities sets `with_logprobs` to False and may get empty lists:
    vLLM is faster without them."""

    prompts: Sequence[Sequence[int]]
    counts: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling
    with_logprobs: bool = True

    def owner_B(self) -> Ints:
        """The index of the prompt that each of the B completions belongs to."""
        return np.repeat(np.arange(len(self.prompts)), self.counts)


@dataclass(frozen=True)
class Samples:
    """B completions in the order of the request, the completions of a prompt side by side.

    `token_ids` end with the stop token when `finish_reasons` says "stop"; "length" means the limit
    cut it. `logprobs` are of the distribution drawn from: temperature applied, top-p and top-k
    renormalised."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]


class Engine(Protocol):
    """Draws samples. `prefix_block` is the grain (tokens) at which a prompt is shared by its
    samples; `prefilled_tokens` counts the prompt tokens that were really computed, never those
    found in a cache."""

    name: str
    version: str
    prefix_block: int
    prefilled_tokens: int

    def generate(
        self, request: Request, on_finished: Callable[[int], object] | None = None
    ) -> Samples:
        """Draw the completions that `request` asks for.

        `on_finished(n)` is called whenever n more completions have ended, for progress bars. Raises
        ArtifactError naming the index of a prompt that leaves no room for `sampling.max_tokens`.
        """
        ...

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the policy's weights in place; they are in effect for the next call."""
        ...

    def sleep(self) -> None:
        """Lend the engine's memory to the trainer until it is used again; an engine without its own
        does nothing."""
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
        on_finished: Callable[[int], object] | None = None,
    ) -> Samples:
        """Draw the completions that `request` asks for, at most `max_rows` at a time.

        Completions start in the order `order_B`; when one ends, the next takes its slot at once.
        The order changes no completion, and the samples come back in the order of the request."""
        ...


def engine_name(settings: EngineSettings) -> str:
    """The engine that `auto` stands for: `server` where servers are named or replicas wanted, vLLM
    on a machine with a GPU where it is installed, else `hf`."""
    if settings.name != "auto":
        return settings.name
    if settings.urls or settings.num_replicas > 1:
        return "server"
    return "vllm" if torch.cuda.is_available() and importlib.util.find_spec("vllm") else "hf"


def load_engine(
    settings: EngineSettings, policy: Policy, model: PreTrainedModel | None = None
) -> Engine:
    """The engine `settings.name` for `policy`. With the trainer's `model` it must take new weights
    in place; an engine that can will sample from `model` itself."""
    name = engine_name(settings)
    module = registry.load(engines, name, "engine.name")
    if name != "server" and (settings.urls or settings.num_replicas != 1):
        raise ParamsError(
            f"engine.urls and engine.num_replicas are of the engine server; engine.name is {name}"
        )
    if model is not None and model.device.type == "cuda":
        check_shared_gpu(name, settings, model)
    return cast(Engine, module.load(settings, policy, model))


def check_shared_gpu(name: str, settings: EngineSettings, model: PreTrainedModel) -> None:
    """Raise ArtifactError when `model`, its training and the engine do not fit the GPU together."""
    free, total = torch.cuda.mem_get_info(model.device)
    reserves = name == "vllm" or (name == "server" and not settings.urls)
    check_memory(
        sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        settings.memory_fraction * total if reserves else 0.0,
        free,
        sleeps=name == "vllm" and settings.sleep,
    )


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, max_length: int) -> None:
    """Raise ArtifactError naming the first prompt that is empty, or does not fit the policy's
    context with its completion."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ArtifactError(
                f"prompt {index} has no tokens, and a completion must begin after one: drop the "
                "prompt"
            )
        if len(prompt) + max_tokens > max_length:
            raise ArtifactError(
                f"prompt {index} has {len(prompt)} tokens, and with sampling.max_tokens "
                f"{max_tokens} that is over the "
                f"policy's context of {max_length}: drop the prompt or lower sampling.max_tokens"
            )


def sample_seed(*parts: Any) -> int:
    """A 63-bit seed from what names a sample; equal names, equal seeds, on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def sample_flops(
    architecture: Architecture,
    prompt_tokens: Sequence[int],
    num_samples: Sequence[int],
    completion_tokens: Sequence[int],
    prefix_block: int,
) -> npt.NDArray[np.float64]:
    """Executed forward FLOPs of each of B samples; the shared part of a prompt is split evenly over
    its samples.

    `completion_tokens` has one entry a sample, in the order of `Samples`. Padding is not counted:
    the contract suite holds this against torch's own counter."""
    flops, start = np.zeros(len(completion_tokens)), 0
    for length, count in zip(prompt_tokens, num_samples, strict=True):
        shared = (length - 1) // prefix_block * prefix_block if prefix_block > 1 else length
        again = (
            prefill_flops(architecture, length) - prefill_flops(architecture, shared)
            if shared < length
            else 0.0
        )
        for row in range(start, start + count):
            decode = decode_flops(architecture, length, completion_tokens[row])
            flops[row] = prefill_flops(architecture, shared) / count + again + decode
        start += count
    return flops
