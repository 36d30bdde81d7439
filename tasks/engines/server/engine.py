"""Sampling through OpenAI-compatible servers: the user's own (`engine.urls`), or vLLM servers
started here (`engine.num_replicas`).

Every completion is a separate request, because a request for n completions has only one seed.
`dispatch.py` chooses its server. A server under a URL must serve the policy (`identity.py`).
Weights are replaced only in servers started here, which have no other users. If one of these exits,
it is restarted, and gets the current weights before its first request."""

import asyncio
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.engines.engine import (
    IsEnough,
    NoServerError,
    Request,
    Samples,
    StoppableEngine,
    Unavailable,
    check_for_vllm,
    check_lengths,
)
from tasks.engines.server.dispatch import BEAT_SECONDS, Dispatch, chunked
from tasks.engines.server.endpoints import Completion, CompletionRequest, Connection, Endpoint
from tasks.engines.server.identity import Identity
from tasks.engines.server.lending import SERVERS, Borrowed, Servers, wait_until_serving
from tasks.engines.server.meter import Meter
from tasks.engines.server.replicas import local
from tasks.engines.server.stopping import NOT_BEGUN, InFlight
from tasks.engines.server.updates import Loading, Versions, check_transfer, transfer_of
from tasks.engines.settings import EngineSettings, parse_url
from tasks.engines.trainers import broadcast, num_trainers, others_waiting, rank
from tasks.engines.weights.vllm_model import check_updates
from tasks.models.policy import (
    Policy,
    load_tokenizer,
    stop_token_ids,
)

logger = logging.getLogger(__name__)

# prefix_block of servers that do not report prefix caching: every completion is charged for its
# whole prompt
UNSHARED = 2**31


class ServerEngine(StoppableEngine):
    """One or more servers of one policy. `replicas` are the servers that this process started or
    borrowed; None for `engine.urls`, and in all training processes but the first, which sends new
    weights to the servers. All training processes sample from the `started` servers, and write new
    weights under the servers' `folder`. Names of weights begin with `prefix`. If `prefix` is not
    empty, the servers may have another process's weights until the first update."""

    name = "server"
    shares_weights = False
    beat_seconds = BEAT_SECONDS

    def __init__(
        self,
        settings: EngineSettings,
        policy: Policy,
        replicas: Servers | None = None,
        started: Sequence[Endpoint] = (),
        prefix: str = "",
        folder: Path | None = None,
    ) -> None:
        # a server admits max_rows at once, over all clients
        max_rows = max(settings.max_rows // num_trainers(), 1)
        self.settings = settings = replace(settings, max_rows=max_rows)
        self.replicas = replicas
        self.endpoints = list(started) or [Endpoint(parse_url(url)) for url in settings.urls]
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.stop_ids = list(stop_token_ids(policy.folder, tokenizer))
        self.identity = Identity(policy, settings.dtype, trusted=bool(started))
        self.models: dict[Endpoint, str] = {}  # the policy's name at each server identified so far
        self.version, self.is_vllm = "unknown", False
        self.versions = Versions(prefix)
        self.changing = threading.Lock()  # held while weights or servers change
        folder = replicas.folder if replicas else folder
        self.transfer = transfer_of(settings, policy, folder) if folder else None
        self.loading = None
        if replicas and self.transfer:
            self.loading = Loading(
                settings.timeout_seconds, replicas, self.identity, self.transfer, self.identify
            )
        self.prefix_block = UNSHARED
        self.meter = Meter()
        self.max_length = policy.max_length
        asyncio.run(self.handshake())

    async def handshake(self) -> None:
        """Identify every server. A server that does not respond may join later. Raise ArtifactError
        if none responds."""
        missing = []
        for endpoint in self.endpoints:
            try:
                async with Connection(endpoint, self.settings.timeout_seconds) as connection:
                    probe = await self.identify(connection)
                    if self.loading:
                        self.loading.probe = probe
                    self.prefix_block = block_size(await self.meter.read(connection))
            except Unavailable as error:
                missing.append(str(error))
        if not self.models:
            raise ArtifactError("no server responds: " + "; ".join(missing))
        for message in missing:
            logger.warning("%s; continuing with the other servers", message)

    async def identify(self, connection: Connection) -> Completion:
        """Check that the server serves the policy, and record the server's name for the model, its
        context length and its version. Return the server's completion of the probe. Raise
        ArtifactError, with the server's name, if it serves another policy."""
        model, probe = await self.identity.check(connection, self.versions.current)
        self.models[connection.endpoint] = str(model["id"])
        self.max_length = min(self.max_length, model.get("max_model_len") or self.max_length)
        self.version = "-".join(re.findall(r"^[a-z]+|\d[\d.]*", probe.fingerprint)[:2]) or "unknown"
        self.is_vllm |= model.get("owned_by") == "vllm" or self.version.startswith("vllm")
        return probe

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        """See `StoppableEngine`. Servers under URLs finish the completions that they have begun."""
        (check_for_vllm if self.is_vllm else check_lengths)(request, self.max_length)
        prompt_B = [request.prompts[owner] for owner in request.owner_B()]
        seeds, written = request.own_seeds(), request.written_B().tolist()
        in_flight, done = InFlight(), dict[int, Completion]()

        async def ask(connection: Connection, row: int) -> Completion:
            if in_flight.is_stopped:  # a row may be requested again after all servers have failed
                return done.get(row, NOT_BEGUN)
            sampling = request.sampling
            completion_request = CompletionRequest(
                self.models[connection.endpoint],
                prompt_B[row],
                replace(sampling, max_tokens=sampling.max_tokens - written[row]),
                seeds[row],
                self.stop_ids,
                request.with_logprobs,
            )
            if self.identity.trusted:
                completion = await in_flight.generate(connection, completion_request)
                self.versions.check(connection.endpoint, completion)
            else:
                completion = await connection.complete(completion_request)
            reason = completion.finish_reason
            if reason == "abort" and not in_flight.is_stopped:
                raise Unavailable(f"{connection.endpoint.url} aborted a completion")
            done[row] = completion
            is_last = reason != "abort" and is_enough(row, completion.token_ids, reason)
            if is_last and not in_flight.is_stopped:
                await in_flight.stop()
            return completion

        started = time.perf_counter()
        answers = self.complete_all(ask, chunked(request.counts, self.settings.max_rows))
        self.meter.seconds += time.perf_counter() - started
        rows = [answers[row] for row in range(len(prompt_B))]
        return Samples(
            [row.token_ids for row in rows],
            [row.logprobs for row in rows],
            [row.finish_reason for row in rows],
            versions=list(map(self.versions.behind, rows)) if self.versions.are_swapped else None,
        )

    def complete_all(
        self,
        ask: Callable[[Connection, int], Awaitable[Completion]],
        chunks: Sequence[Sequence[int]],
    ) -> dict[int, Completion]:
        """Return every row's completion. If all servers fail, restart those that were started here,
        or raise NoServerError if `can_rejoin` is false."""
        answers: dict[int, Completion] = {}
        while True:
            self.rejoin()
            requested = self.endpoints
            left = [[row for row in chunk if row not in answers] for chunk in chunks]
            try:
                asyncio.run(self.complete(ask, left, answers))
            except NoServerError as error:
                with self.changing:  # other servers may have received new weights meanwhile
                    has_others = bool(set(self.endpoints) - set(requested))
                if has_others:
                    continue
                if self.loading is None or not self.can_rejoin:
                    raise
                logger.warning("%s; waiting until a server has restarted", error)
                for endpoint in self.endpoints:  # a server may still be healthy
                    self.loading.replicas.drop(endpoint)
                self.endpoints = []
                self.loading.replicas.wait_for_one()
            else:
                return answers

    @property
    def can_rejoin(self) -> bool:
        """Whether a restarted server can get the current weights before the next update."""
        if self.loading is None or num_trainers() > 1:
            return False
        return self.loading.transfer.repeats or not self.versions.num_updates

    def rejoin(self) -> None:
        """Restart servers that have exited, and load the current weights into servers that are up
        again. If `can_rejoin` is false, leave both to the next update."""
        if self.loading is None or not self.can_rejoin:
            return
        with self.changing:
            self.loading.replicas.revive()
            serving = self.loading.replicas.serving(self.endpoints)
            if new := [endpoint for endpoint in serving if endpoint not in self.endpoints]:
                joined = asyncio.run(self.loading.load(new, self.versions))
                known = [endpoint for endpoint in self.endpoints if endpoint in serving]
                self.endpoints = [*known, *joined]

    async def complete(
        self,
        ask: Callable[[Connection, int], Awaitable[Completion]],
        chunks: Sequence[Sequence[int]],
        answers: dict[int, Completion],
    ) -> None:
        """Put every row's completion into `answers`, from any server that is free. A server that
        was down is identified again."""
        settings = self.settings
        endpoints = from_own_first(self.endpoints, rank(), num_trainers())
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(Connection(endpoint, settings.timeout_seconds))
                for endpoint in endpoints
            ]
            dispatch = Dispatch[Connection, Completion](
                connections,
                ask,
                self.identify,
                self.is_alive,
                self.give_up,
                settings.max_rows,
                settings.max_retries,
                self.beat_seconds,
            )
            for number, endpoint in enumerate(endpoints):
                if endpoint not in self.models:
                    dispatch.mark_down(number, f"{endpoint.url} has not responded yet")
            try:
                await dispatch.run(chunks)
                await asyncio.gather(*map(self.meter.read, connections))
            finally:
                answers |= dispatch.answers

    async def is_alive(self, connection: Connection) -> bool:
        """Return whether a server responds; True while its weights are being replaced."""
        if self.changing.locked() or not await connection.is_alive():
            return self.changing.locked()
        await self.meter.read(connection)
        return True

    def give_up(self, connection: Connection) -> str:
        """Stop a dead server, if it was started here. Return its URL."""
        if self.replicas:
            self.replicas.drop(connection.endpoint)
        return connection.endpoint.url

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int | None = None) -> None:
        """Load the weights into every replica and clear the prefix caches, unless all replicas have
        this `version` already. All training processes must call this.

        `weights` must include tied weights (`NamedWeights` does). A replica that fails to load them
        is stopped and restarted, because it still has its old weights. Raise ArtifactError for
        servers that were not started here."""
        if version is not None and broadcast(self.has_everywhere(version)):
            self.versions.settle()
            return
        self.replace_weights(weights, version, in_flight=False)

    def swap_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See `SwappingEngine`. A replica that fails to load the weights is stopped, and its
        completions in flight are sampled again."""
        with self.changing:
            self.replace_weights(weights, version, in_flight=True)

    def replace_weights(
        self, weights: Mapping[str, torch.Tensor], version: int | None, *, in_flight: bool
    ) -> None:
        """Name the new weights in all processes before any server gets them. Then load them into
        all servers that are up or, if completions are `in_flight`, only into the servers that are
        already sampling."""
        if self.transfer is None:
            raise ArtifactError(NOT_OURS)
        self.versions.count(version, in_flight=in_flight)
        broadcast(None)
        self.transfer.take(weights, self.versions.current)
        if self.loading is not None:
            serving: Sequence[Endpoint] = self.endpoints
            with others_waiting():
                if not in_flight:
                    self.loading.replicas.revive()
                    serving = self.loading.replicas.serving(self.endpoints)
                self.update_servers(self.loading, serving, in_flight=in_flight)
        self.endpoints = broadcast(self.endpoints, is_patient=True)

    def has_everywhere(self, version: int) -> bool:
        """Return whether all servers are up, and the last update or swap had this `version`."""
        if self.loading is None or self.versions.known.get(self.versions.current) != version:
            return False
        serving = self.loading.replicas.serving(self.endpoints)
        is_whole = len(serving) == self.loading.replicas.num
        return self.versions.are_swapped and is_whole and set(serving) == set(self.endpoints)

    def update_servers(
        self, loading: Loading, serving: Sequence[Endpoint], *, in_flight: bool
    ) -> None:
        """Load new weights into these servers or, if all fail, into the next to come up. Raise
        ArtifactError if all fail in the first update, NoServerError if weights cannot be resent."""
        self.endpoints, loading.probe = [], None
        while not self.endpoints:
            if not (serving or loading.transfer.repeats) and num_trainers() > 1:
                raise NoServerError("there is no server for the new weights")
            serving = serving or loading.replicas.wait_for_one()
            loaded = loading.load(serving, self.versions, in_flight=in_flight)
            self.endpoints, serving = asyncio.run(loaded), []
            if not self.endpoints and self.versions.num_updates == 1:
                raise ArtifactError(
                    "no vLLM server accepts new weights of this policy, so they cannot sample in "
                    f"training: set engine.name to hf. The reason: {loading.reason}"
                )

    def metrics(self) -> dict[str, float]:
        return self.meter.figures()

    def close(self) -> None:
        """Stop the servers that were started here. They also stop when this object is deleted."""
        if self.replicas:
            self.replicas.close()


NOT_OURS = (
    "training replaces the policy's weights after every step, which it must not do in servers that "
    "others may be using: leave engine.urls empty (engine.num_replicas starts servers here), or "
    "train with engine.name vllm or hf"
)


def block_size(metrics: str) -> int:
    """Return the block size in tokens of the server's prefix cache, from its metrics; UNSHARED if
    they do not report an enabled cache."""
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', metrics)
    shares = re.search(r'cache_config_info\{[^}]*\benable_prefix_caching="True"', metrics)
    return int(found[1]) if found and shares else UNSHARED


def load(
    settings: EngineSettings,
    policy: Policy,
    model: PreTrainedModel | None,
    logs: Path | None = None,
) -> ServerEngine:
    """Return the engine for `policy`. Raise ArtifactError for a `model` with `urls`."""
    if model is not None and settings.urls:
        raise ArtifactError(NOT_OURS)
    if settings.urls:
        return ServerEngine(settings, policy)
    if model is not None:
        check_updates(model)
        check_transfer(settings, num_trainers())
    replicas, started = None, list[Endpoint]()
    with nullcontext() if model is None else others_waiting():
        if model is None or rank() == 0:
            replicas = find_servers(settings, policy, model, logs)
            wait_until_serving(replicas)
            started = replicas.wait_for_one()
    prefix = f"{uuid.uuid4().hex[:8]}-" if isinstance(replicas, Borrowed) else ""
    shared = started, prefix, replicas.folder if replicas else None
    if model is not None:
        shared = broadcast(shared, is_patient=True)
    return ServerEngine(settings, policy, replicas, *shared)


def find_servers(
    settings: EngineSettings, policy: Policy, model: PreTrainedModel | None, logs: Path | None
) -> Servers:
    """Return the servers lent by the command that started the training run, or start servers."""
    if model is not None and SERVERS in os.environ:
        return Borrowed(Path(os.environ[SERVERS]))
    if settings.cluster == "local":
        return local(settings, policy, 0 if model is None else num_trainers(), logs)
    from tasks.engines.cluster.servers import on_cluster

    return on_cluster(settings, settings.cluster, policy, logs=logs)


def from_own_first(endpoints: Sequence[Endpoint], rank: int, size: int) -> list[Endpoint]:
    """Return `endpoints` rotated so that the `size` ranks begin at evenly spaced servers."""
    first = rank * len(endpoints) // size
    return [*endpoints[first:], *endpoints[:first]]
