"""The engine contract: sample completions of prompts reproducibly, and replace the policy's weights
in place.

An engine is one file or folder in `engines/`; its name is the file's. All engines pass one contract
suite. A seed belongs to a completion, not to a batch: a completion depends on the policy, the
prompt, the sampling settings and its own seed, and not on the other completions of the call or
their order (in float32 exactly, up to the rounding of matrix products)."""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tasks import engines
from tasks.common import registry
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError, at_least
from tasks.engines.memory import TrainingMemory, check_memory
from tasks.models.policy import Policy

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """The section `sampling`: the settings that a completion depends on. Temperature 0 is
    greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Cluster:
    """`engine.cluster` where it names a Ray cluster: the address of its head, the processes that
    train (a GPU each), the vLLM servers and the GPUs of each, and a folder that all machines see,
    through which new weights reach the servers."""

    ray: str
    trainers: int
    engines: int
    gpus_per_engine: int
    shared: str


@dataclass(frozen=True)
class EngineSettings:
    """The section `engine`: how completions are computed. None of it is part of a key of the
    rollout store.

    `urls`, `num_replicas`, `weight_transfer`, `max_retries` and `timeout_seconds` (of one request)
    apply to the engine `server` only."""

    name: str
    device: str
    dtype: str
    max_rows: int
    memory_fraction: float
    sleep: bool
    threads: int
    num_processes: int
    cluster: Cluster | Literal["local"]
    urls: list[str]
    num_replicas: int
    weight_transfer: Literal["file", "nccl"]
    max_retries: int
    timeout_seconds: float


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

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
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

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int | None = None) -> None:
        """As `Engine`. With the `version` of the policy, the number of its updates, samples have
        `versions` from now on."""
        ...

    def swap_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """As `set_weights`, while another thread may be in `generate`: completions in flight go on
        with the new weights. The log-probability of a token is that of the weights that wrote it,
        given all tokens before it."""
        ...


def engine_name(settings: EngineSettings) -> str:
    """Return the engine's name. `auto` is `server` where URLs or several replicas are set, `vllm`
    on a machine with a GPU where vLLM is installed, else `hf`; `server` where a cluster has
    engines."""
    if settings.name != "auto":
        return settings.name
    if settings.urls or settings.num_replicas > 1 or has_cluster_engines(settings):
        return "server"
    return "vllm" if torch.cuda.is_available() and importlib.util.find_spec("vllm") else "hf"


def has_cluster_engines(settings: EngineSettings) -> bool:
    """Whether vLLM servers are to run on the machines of a cluster."""
    return settings.cluster != "local" and settings.cluster.engines > 0


def check_cluster(settings: EngineSettings) -> None:
    """Raise ParamsError for a cluster that cannot be, or beside what it excludes."""
    cluster = settings.cluster
    if cluster == "local":
        return
    at_least(1, engine__cluster__trainers=cluster.trainers)
    at_least(0, engine__cluster__engines=cluster.engines)
    at_least(1, engine__cluster__gpus_per_engine=cluster.gpus_per_engine)
    if settings.urls or settings.num_replicas != 1 or settings.num_processes != 1:
        raise ParamsError(
            "engine.cluster says how many processes train and sample: leave engine.num_processes "
            "and engine.num_replicas at 1 and engine.urls empty"
        )
    if cluster.engines and engine_name(settings) != "server":
        raise ParamsError(
            f"engine.cluster.engines is {cluster.engines}, which are vLLM servers, and engine.name "
            f"is {settings.name}: set it to server or auto, or engines to 0"
        )
    if not cluster.engines and settings.name == "server":
        raise ParamsError("engine.name is server, and engine.cluster.engines is 0: name some")


def load_engine(
    settings: EngineSettings, policy: Policy, model: PreTrainedModel | None = None
) -> Engine:
    """Return the engine `settings.name` for `policy`. With the trainer's `model`, the engine must
    replace its weights in place; one that can samples from `model` itself."""
    check_cluster(settings)
    name = engine_name(settings)
    module = registry.load(engines, name, "engine.name")
    if name != "server" and (settings.urls or settings.num_replicas != 1):
        raise ParamsError(
            "engine.urls and engine.num_replicas apply to the engine server, and engine.name is "
            f"{name}: set it to server, or leave urls empty and num_replicas at 1"
        )
    return cast(Engine, module.load(settings, policy, model))


def num_trainer_gpus(
    settings: EngineSettings, num_processes: int, device: torch.device, num_gpus: int | None = None
) -> int:
    """How many GPUs the `num_processes` of a trainer keep to themselves: all of theirs where this
    process sees one for every server that it starts as well; else none, and the engine's are the
    first ones, too."""
    if device.type != "cuda" or engine_name(settings) != "server" or settings.urls:
        return 0
    if has_cluster_engines(settings):  # on other GPUs, or other machines
        return num_processes
    seen = torch.cuda.device_count() if num_gpus is None else num_gpus
    return num_processes if seen >= num_processes + settings.num_replicas else 0


def check_shared_gpu(
    settings: EngineSettings, num_processes: int, device: torch.device, training: TrainingMemory
) -> None:
    """Raise ArtifactError when training, whose weights are loaded, and the engine do not fit the
    GPU together. On a CPU nothing is checked."""
    if device.type != "cuda":
        return
    name = engine_name(settings)
    free, total = torch.cuda.mem_get_info(device)
    is_shared = not num_trainer_gpus(settings, num_processes, device)
    reserves = name == "vllm" or (name == "server" and not settings.urls and is_shared)
    check_memory(
        training,
        settings.memory_fraction * total if reserves else 0.0,
        free,
        sleeps=name == "vllm" and settings.sleep,
    )


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
