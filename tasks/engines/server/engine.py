"""Sampling through OpenAI-compatible servers: the user's own (`engine.urls`), or vLLM servers
started here (`engine.num_replicas`).

Every sample is a request of its own, because one request for n samples carries one seed; the
server's prefix cache reads a prompt once for all its samples, which therefore go to one server.
What a server fails at goes to the others. A server under a URL must hold the very policy that is
asked for: the log-probabilities of a probe are compared with transformers' (`identity.py`). Weights
are replaced only in servers started here, which nobody else uses."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
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

# prefix_block of servers that do not say how they share a prompt: it is counted for every sample
UNSHARED = 2**31


class ServerEngine:
    """One or more servers of one policy. `replicas` are the servers started here, None for those
    under URLs."""

    name = "server"

    def __init__(self, settings: EngineSettings, policy: Policy, replicas: Replicas | None) -> None:
        self.settings, self.replicas, self.prefilled_tokens = settings, replicas, 0
        if replicas:
            sockets = enumerate(replica.socket for replica in replicas.replicas)
            self.endpoints = [Endpoint(f"http://replica-{i}/v1", path) for i, path in sockets]
        else:
            self.endpoints = [Endpoint(parse_url(url)) for url in settings.urls]
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.stop_ids = list(stop_token_ids(policy.folder, tokenizer))
        self.identity = Identity(policy, settings.dtype, trusted=replicas is not None)
        self.models: dict[
            Endpoint, str
        ] = {}  # what the policy is called at each server that was met
        self.version, self.prefix_block, self.max_length = "unknown", UNSHARED, policy.max_length
        asyncio.run(self.meet())

    async def meet(self) -> None:
        """Get to know every server. One that is not there may come later; ArtifactError when none
        is."""
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
            logger.warning("%s; the others begin without it", message)

    async def identify(self, connection: Connection) -> None:
        """Check that the server holds the policy; ArtifactError naming the server when it does
        not."""
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
        answers = asyncio.run(self.draw(ask, chunks, on_finished))
        rows = [answers[row] for row in range(len(prompt_B))]
        self.prefilled_tokens += sum(map(len, prompt_B))
        self.prefilled_tokens -= sum(row.cached_tokens for row in rows)
        return Samples(
            [row.token_ids for row in rows],
            [row.logprobs for row in rows],
            [row.finish_reason for row in rows],
        )

    async def draw(
        self,
        ask: Callable[[Connection, int], Awaitable[Completion]],
        chunks: Sequence[Sequence[int]],
        on_finished: Callable[[int], object] | None,
    ) -> dict[int, Completion]:
        """Every row's completion, from whichever server is free. A server that was away is
        identified again."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            lines = [Connection(endpoint, settings.timeout_seconds) for endpoint in self.endpoints]
            for line in lines:
                await stack.enter_async_context(line)
            dispatch = Dispatch(
                lines, ask, self.identify, settings.max_rows, settings.max_retries, on_finished
            )
            for number, endpoint in enumerate(self.endpoints):
                if endpoint not in self.models:
                    dispatch.set_down(number, f"{endpoint.url} has not been there yet")
            return await dispatch.run(chunks)

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the weights into every replica, by way of a file, and forget every cached prefix.

        `weights` must spell out tied ones (`models.named_weights` does). A replica that is lost is
        not used again: it would answer with the weights it had. Raises ArtifactError for servers
        that were not started here."""
        if self.replicas is None:
            raise ArtifactError(NOT_OURS)
        folder = Path(self.replicas.folder.name) / "weights"
        folder.mkdir(exist_ok=True)
        save_file(
            {name: tensor.cpu().contiguous().clone() for name, tensor in weights.items()},
            folder / "all.safetensors",
        )
        asyncio.run(self.reload(folder))

    async def reload(self, folder: Path) -> None:
        """Have every replica read `folder`; those that cannot are left out from now on."""
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
            raise ArtifactError("no replica took the new weights: " + "; ".join(lost.values()))
        for error in lost.values():
            logger.warning("%s; it did not take the new weights and is not used again", error)

    async def reload_one(self, endpoint: Endpoint, folder: Path) -> str | None:
        """What went wrong, None when the weights are in effect."""
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
    "training replaces the policy's weights after every step, and not in servers that others may "
    "be using: leave "
    "engine.urls empty (engine.num_replicas starts servers here), or train with engine.name vllm "
    "or hf"
)


async def read_block_size(connection: Connection) -> int:
    """The grain at which the server shares prompts, from its metrics; UNSHARED where it does not
    say."""
    url = f"{connection.endpoint.url.removesuffix('/v1')}/metrics"
    try:
        text = await connection.text(url)
    except (Unavailable, ArtifactError):
        return UNSHARED
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', text)
    shares = re.search(r'cache_config_info\{[^}]*\benable_prefix_caching="True"', text)
    return int(found[1]) if found and shares else UNSHARED


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> ServerEngine:
    """The engine for `policy`. With the trainer's model only servers started here will do."""
    at_least(1, engine__num_replicas=settings.num_replicas, engine__max_rows=settings.max_rows)
    at_least(0, engine__max_retries=settings.max_retries)
    if settings.urls and settings.num_replicas > 1:
        raise ParamsError(
            "engine.urls names servers and engine.num_replicas starts them: set one of the two"
        )
    if model is not None and settings.urls:
        raise ArtifactError(NOT_OURS)
    if model is not None and settings.num_processes > 1:
        raise ParamsError(
            "engine.num_processes above 1 trains with engine.name hf or vllm: each process would "
            "start servers"
        )
    return ServerEngine(settings, policy, None if settings.urls else Replicas(settings, policy))
