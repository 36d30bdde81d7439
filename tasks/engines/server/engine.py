"""Sampling through OpenAI-compatible servers: the user's own (`engine.urls`), or vLLM servers
started here (`engine.num_replicas`).

Every completion is a request of its own, because a request for n completions has only one seed. The
completions of a prompt go to one server, whose prefix cache then computes the prefill once. What
one server fails to answer goes to the others. A server under a URL must hold exactly the policy
asked for: the log-probabilities of a probe are compared with transformers' (`identity.py`). Weights
are replaced only in servers started here, which nobody else uses."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as distributed
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError, at_least
from tasks.engines.engine import EngineSettings, Request, Samples, check_lengths
from tasks.engines.server.dispatch import Dispatch, Unavailable, chunked
from tasks.engines.server.endpoints import Completion, Connection, Endpoint, parse_url
from tasks.engines.server.identity import Identity
from tasks.engines.server.replicas import Replicas
from tasks.models.policy import Policy, load_tokenizer, stop_token_ids

logger = logging.getLogger(__name__)
T = TypeVar("T")

# prefix_block of servers that do not say how they share a prompt: every completion is charged for
# it
UNSHARED = 2**31


class ServerEngine:
    """One or more servers of one policy. `replicas` are the servers started here, None for those
    under URLs. Of several processes that train, the first starts them and gives them new weights,
    and all sample from them by their `sockets`."""

    name = "server"
    shares_weights = False

    def __init__(
        self,
        settings: EngineSettings,
        policy: Policy,
        replicas: Replicas | None = None,
        sockets: Sequence[Path] = (),
    ) -> None:
        # a server admits max_rows at once, whoever asks
        max_rows = max(settings.max_rows // num_askers(), 1)
        self.settings = settings = replace(settings, max_rows=max_rows)
        self.replicas = replicas
        self.prefilled_tokens = 0
        if sockets:
            self.endpoints = [
                Endpoint(f"http://replica-{i}/v1", path) for i, path in enumerate(sockets)
            ]
        else:
            self.endpoints = [Endpoint(parse_url(url)) for url in settings.urls]
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.stop_ids = list(stop_token_ids(policy.folder, tokenizer))
        self.identity = Identity(policy, settings.dtype, trusted=bool(sockets))
        self.models: dict[Endpoint, str] = {}  # the policy's name at each server identified so far
        self.version = "unknown"
        self.prefix_block = UNSHARED
        self.max_length = policy.max_length
        asyncio.run(self.handshake())

    async def handshake(self) -> None:
        """Identify every server. One that does not answer may come later; ArtifactError when none
        answers."""
        missing = []
        for endpoint in self.endpoints:
            try:
                async with Connection(endpoint, self.settings.timeout_seconds) as connection:
                    await self.identify(connection)
                    self.prefix_block = await read_block_size(connection)
            except Unavailable as error:
                missing.append(str(error))
        if not self.models:
            raise ArtifactError("no server answers: " + "; ".join(missing))
        for message in missing:
            logger.warning("%s; the other servers start without it", message)

    async def identify(self, connection: Connection) -> None:
        """Check that the server holds the policy, and note its name there, its context and its
        version. Raises ArtifactError naming the server when it holds something else."""
        model, max_length, fingerprint = await self.identity.check(connection)
        self.models[connection.endpoint] = model
        self.max_length = min(self.max_length, max_length or self.max_length)
        self.version = "-".join(re.findall(r"^[a-z]+|\d[\d.]*", fingerprint)[:2]) or "unknown"

    def generate(
        self, request: Request, on_finished: Callable[[int], object] | None = None
    ) -> Samples:
        check_lengths(request.prompts, request.sampling.max_tokens, self.max_length)
        prompt_B = [request.prompts[owner] for owner in request.owner_B()]

        async def ask(connection: Connection, row: int) -> Completion:
            completion, _ = await connection.complete(
                self.models[connection.endpoint],
                prompt_B[row],
                request.sampling,
                request.seeds[row],
                self.stop_ids,
                request.with_logprobs,
            )
            return completion

        chunks = chunked(request.counts, self.settings.max_rows)
        answers = asyncio.run(self.complete(ask, chunks, on_finished))
        rows = [answers[row] for row in range(len(prompt_B))]
        self.prefilled_tokens += sum(map(len, prompt_B))
        self.prefilled_tokens -= sum(row.cached_tokens for row in rows)
        return Samples(
            [row.token_ids for row in rows],
            [row.logprobs for row in rows],
            [row.finish_reason for row in rows],
        )

    async def complete(
        self,
        ask: Callable[[Connection, int], Awaitable[Completion]],
        chunks: Sequence[Sequence[int]],
        on_finished: Callable[[int], object] | None,
    ) -> dict[int, Completion]:
        """Return every row's completion, from whichever server is free. A server that was down is
        identified again."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(Connection(endpoint, settings.timeout_seconds))
                for endpoint in self.endpoints
            ]
            dispatch = Dispatch(
                connections,
                ask,
                self.identify,
                settings.max_rows,
                settings.max_retries,
                on_finished,
            )
            for number, endpoint in enumerate(self.endpoints):
                if endpoint not in self.models:
                    dispatch.mark_down(number, f"{endpoint.url} has not answered yet")
            return await dispatch.run(chunks)

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the weights into every replica through a file, and clear its prefix cache. All
        training processes must call it.

        `weights` must include tied ones (`NamedWeights` does). A replica that does not load them is
        not used again, by any process: it would answer with its old weights. Raises ArtifactError
        for servers that were not started here."""
        if self.settings.urls:
            raise ArtifactError(NOT_OURS)
        if self.replicas is None:  # the first process sends them; a sharded weight is made by all
            for _ in weights.values():
                pass
        else:
            folder = self.replicas.folder / "weights"
            folder.mkdir(exist_ok=True)
            save_file(
                {name: tensor.cpu().contiguous().clone() for name, tensor in weights.items()},
                folder / "all.safetensors",
            )
            asyncio.run(self.reload(folder))
        self.endpoints = broadcast(self.endpoints)

    async def reload(self, folder: Path) -> None:
        """Make every replica load the weights in `folder`; one that fails is not used again."""
        results = await asyncio.gather(
            *(self.reload_one(endpoint, folder) for endpoint in self.endpoints)
        )
        lost = {
            endpoint: error
            for endpoint, error in zip(self.endpoints, results, strict=True)
            if error
        }
        self.endpoints = [endpoint for endpoint in self.endpoints if endpoint not in lost]
        if not self.endpoints:
            raise ArtifactError("no replica loaded the new weights: " + "; ".join(lost.values()))
        for error in lost.values():
            logger.warning("%s; it did not load the new weights and is not used again", error)

    async def reload_one(self, endpoint: Endpoint, folder: Path) -> str | None:
        """Return what went wrong; None when the weights are in effect."""
        root = endpoint.url.removesuffix("/v1")
        try:
            async with Connection(endpoint, self.settings.timeout_seconds) as connection:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await connection.request("POST", f"{root}/collective_rpc", body)
                answer = await connection.request("POST", f"{root}/reset_prefix_cache")
        except (Unavailable, ArtifactError) as error:
            return str(error)
        return None if answer.get("success") else f"{endpoint.url} did not reset its prefix cache"

    def sleep(self) -> None:
        """Servers keep their memory: give them GPUs of their own, or use the engine vllm."""

    def close(self) -> None:
        """End the servers that were started here; the end of this object does so too."""
        if self.replicas:
            self.replicas.close()


NOT_OURS = (
    "training replaces the policy's weights after every step, which it must not do in servers that "
    "others may be using: leave engine.urls empty (engine.num_replicas starts servers here), or "
    "train with engine.name vllm or hf"
)


async def read_block_size(connection: Connection) -> int:
    """Return the block size of the server's prefix cache, from its metrics; UNSHARED where it does
    not say."""
    url = f"{connection.endpoint.url.removesuffix('/v1')}/metrics"
    try:
        text = await connection.text(url)
    except (Unavailable, ArtifactError):
        return UNSHARED
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', text)
    shares = re.search(r'cache_config_info\{[^}]*\benable_prefix_caching="True"', text)
    return int(found[1]) if found and shares else UNSHARED


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> ServerEngine:
    """Return the engine for `policy`. Training needs servers that are started here."""
    at_least(1, engine__num_replicas=settings.num_replicas, engine__max_rows=settings.max_rows)
    at_least(0, engine__max_retries=settings.max_retries)
    if settings.urls and settings.num_replicas > 1:
        raise ParamsError(
            "engine.urls names servers and engine.num_replicas starts them: set one of the two"
        )
    if model is not None and settings.urls:
        raise ArtifactError(NOT_OURS)
    if settings.urls:
        return ServerEngine(settings, policy)
    replicas = None
    if model is None:
        replicas = Replicas(settings, policy)
    elif num_askers() == 1 or distributed.get_rank() == 0:
        replicas = Replicas(settings, policy, num_askers())
    sockets = [replica.socket for replica in replicas.replicas] if replicas else []
    return ServerEngine(
        settings, policy, replicas, sockets if model is None else broadcast(sockets)
    )


def num_askers() -> int:
    """The processes that train, and sample from the same servers."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def broadcast(value: T) -> T:
    """The value that the first of the training processes has; all wait for it."""
    if num_askers() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]
