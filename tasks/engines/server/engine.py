"""Sampling through OpenAI-compatible servers: the user's own (`engine.urls`), or vLLM servers
started here (`engine.num_replicas`).

Every completion is a request of its own, because a request for n completions has only one seed. The
completions of a prompt go to one server, whose prefix cache then computes the prefill once. What
one server fails to answer goes to the others. A server under a URL must hold exactly the policy
asked for: the log-probabilities of a probe are compared with transformers' (`identity.py`). Weights
are replaced only in servers started here, which nobody else uses. A server that was started here
and ends is started again; before it answers anything it gets the current weights, and its version
of them and a probe are checked."""

import asyncio
import logging
import os
import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import (
    IsEnough,
    NoServerError,
    OnEnded,
    Request,
    Samples,
    Unavailable,
    check_lengths,
    never,
)
from tasks.engines.server.askers import agree, broadcast, keep_waiting, num_askers, rank
from tasks.engines.server.dispatch import BEAT_SECONDS, Dispatch, chunked
from tasks.engines.server.endpoints import Completion, Connection, Endpoint, Wanted
from tasks.engines.server.identity import Identity
from tasks.engines.server.lending import SERVERS, Borrowed
from tasks.engines.server.replicas import Servers, local
from tasks.engines.server.stopping import NOT_BEGUN, InFlight
from tasks.engines.server.updates import Loading, Versions, check_transfer
from tasks.engines.settings import EngineSettings, parse_url
from tasks.engines.weights.vllm_model import check_updates
from tasks.models.policy import (
    Policy,
    load_tokenizer,
    stop_token_ids,
)

logger = logging.getLogger(__name__)

# prefix_block of servers that do not say how they share a prompt: every completion is charged for
# it
UNSHARED = 2**31


class ServerEngine:
    """One or more servers of one policy. `replicas` are the servers started here, None for those
    under URLs. Of several processes that train, the first starts them and gives them new weights,
    and all sample from those that were `started`. With a `prefix` of the names of weights, the
    servers may have those of another process until they get some."""

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
    ) -> None:
        # a server admits max_rows at once, of all clients together
        max_rows = max(settings.max_rows // num_askers(), 1)
        self.settings = settings = replace(settings, max_rows=max_rows)
        self.replicas = replicas
        self.prefilled_tokens = 0
        self.endpoints = list(started) or [Endpoint(parse_url(url)) for url in settings.urls]
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.stop_ids = list(stop_token_ids(policy.folder, tokenizer))
        self.identity = Identity(policy, settings.dtype, trusted=bool(started))
        self.models: dict[Endpoint, str] = {}  # the policy's name at each server identified so far
        self.version = "unknown"
        self.versions = Versions(prefix)
        self.changing = threading.Lock()  # weights, or servers
        self.loading = (
            Loading(settings, replicas, self.identity, self.identify) if replicas else None
        )
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
                    probe = await self.identify(connection)
                    if self.loading:
                        self.loading.probe = probe
                    self.prefix_block = await read_block_size(connection)
            except Unavailable as error:
                missing.append(str(error))
        if not self.models:
            raise ArtifactError("no server answers: " + "; ".join(missing))
        for message in missing:
            logger.warning("%s; the other servers start without it", message)

    async def identify(self, connection: Connection) -> Completion:
        """Check that the server holds the policy, and note its name there, its context and its
        version. Returns its answer to the probe. Raises ArtifactError naming the server when it
        holds something else."""
        found = await self.identity.check(connection, self.versions.current)
        self.models[connection.endpoint] = found.name
        self.max_length = min(self.max_length, found.max_length or self.max_length)
        self.version = "-".join(re.findall(r"^[a-z]+|\d[\d.]*", found.fingerprint)[:2]) or "unknown"
        return found.probe

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Samples:
        return self.generate_until(request, never(on_ended))

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        """See `StoppableEngine`. Servers under URLs finish what they have begun."""
        check_lengths(request, self.max_length)
        prompt_B = [request.prompts[owner] for owner in request.owner_B()]
        seeds, written = request.own_seeds(), request.written_B().tolist()
        in_flight, done = InFlight(), dict[int, Completion]()

        async def ask(connection: Connection, row: int) -> Completion:
            if in_flight.is_stopped:  # it may be asked again when all servers have failed
                return done.get(row, NOT_BEGUN)
            sampling = request.sampling
            wanted = Wanted(
                self.models[connection.endpoint],
                prompt_B[row],
                replace(sampling, max_tokens=sampling.max_tokens - written[row]),
                seeds[row],
                self.stop_ids,
                request.with_logprobs,
            )
            if self.identity.trusted:
                completion = await in_flight.generate(connection, wanted)
                self.versions.check(connection.endpoint, completion)
            else:
                completion, _ = await connection.complete(wanted)
            reason = completion.finish_reason
            if reason == "abort" and not in_flight.is_stopped:
                raise Unavailable(f"{connection.endpoint.url} stopped a completion by itself")
            done[row] = completion
            is_last = reason != "abort" and is_enough(row, completion.token_ids, reason)
            if is_last and not in_flight.is_stopped:
                await in_flight.stop()
            return completion

        answers = self.complete_all(ask, chunked(request.counts, self.settings.max_rows))
        rows = [answers[row] for row in range(len(prompt_B))]
        began = [place for place, row in enumerate(rows) if row.token_ids]
        self.prefilled_tokens += sum(len(prompt_B[place]) for place in began)
        self.prefilled_tokens -= sum(row.cached_tokens for row in rows)
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
        """Return every row's completion. When all servers that were started here have ended, they
        are started again; not where other processes sample from them, too."""
        answers: dict[int, Completion] = {}
        while True:
            self.rejoin()
            asked = self.endpoints
            left = [[row for row in chunk if row not in answers] for chunk in chunks]
            try:
                asyncio.run(self.complete(ask, left, answers))
            except NoServerError as error:
                with self.changing:  # new weights may have been sent to others meanwhile
                    has_others = bool(set(self.endpoints) - set(asked))
                if has_others:
                    continue
                if self.loading is None or not self.can_rejoin:
                    raise
                logger.warning("%s; waiting for one that is started again", error)
                for endpoint in self.endpoints:  # it may say that it is healthy
                    self.loading.replicas.drop(endpoint)
                self.endpoints = []
                self.loading.replicas.wait_for_one()
            else:
                return answers

    @property
    def can_rejoin(self) -> bool:
        """Whether a server that was started again can get the current weights at once."""
        if self.loading is None or num_askers() > 1:
            return False
        return self.loading.transfer.repeats or not self.versions.num_updates

    def rejoin(self) -> None:
        """Start again what has ended, and take in what is up again, with the current weights. Where
        other processes sample from the servers, too, this waits for the next weights."""
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
        """Put every row's completion into `answers`, from whichever server is free. A server that
        was down is identified again."""
        settings = self.settings
        endpoints = from_own_first(self.endpoints, rank(), num_askers())
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
                    dispatch.mark_down(number, f"{endpoint.url} has not answered yet")
            try:
                await dispatch.run(chunks)
            finally:
                answers |= dispatch.answers

    async def is_alive(self, connection: Connection) -> bool:
        """Whether a server answers; while its weights are replaced it need not."""
        return self.changing.locked() or await connection.is_alive()

    def give_up(self, connection: Connection) -> str:
        """End a server that is dead, where it was started here: its URL."""
        if self.replicas:
            self.replicas.drop(connection.endpoint)
        return connection.endpoint.url

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int | None = None) -> None:
        """Load the weights into every replica, and clear its prefix cache. All training processes
        must call it.

        `weights` must include tied ones (`NamedWeights` does). A replica that does not load them is
        ended and started again: it would answer with its old weights. Raises ArtifactError for
        servers that were not started here."""
        if version is not None and broadcast(self.has_everywhere(version)):
            self.versions.settle()
            return
        self.count_update(version, in_flight=False)
        if self.loading is not None:
            self.loading.transfer.take(weights, self.versions.current)
            self.loading.replicas.revive()
            self.update_servers(self.loading, self.loading.replicas.serving(self.endpoints))
        else:
            self.take_part(weights)
        self.endpoints = agree(self.endpoints)

    def swap_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See `SwappingEngine`. A replica that does not load the weights is ended, and what it was
        writing is sampled again."""
        with self.changing:
            self.count_update(version, in_flight=True)
            if self.loading is not None:
                self.loading.transfer.take(weights, self.versions.current)
                self.update_servers(self.loading, self.endpoints, in_flight=True)
            else:
                self.take_part(weights)
            self.endpoints = agree(self.endpoints)

    def has_everywhere(self, version: int) -> bool:
        """Whether all servers are there, and have the weights of this version of the policy, by a
        swap."""
        if self.loading is None or self.versions.known.get(self.versions.current) != version:
            return False
        serving = self.loading.replicas.serving(self.endpoints)
        is_whole = len(serving) == self.loading.replicas.num
        return self.versions.are_swapped and is_whole and set(serving) == set(self.endpoints)

    def update_servers(
        self, loading: Loading, serving: Sequence[Endpoint], *, in_flight: bool = False
    ) -> None:
        """Put new weights into these servers, or if none takes them into the next that is up.
        Raises ArtifactError where none takes the first ones: the next would not either."""
        self.endpoints, loading.probe = [], None
        while not self.endpoints:
            if not (serving or loading.transfer.repeats) and num_askers() > 1:
                raise NoServerError("no server is there for the new weights")
            serving = serving or loading.replicas.wait_for_one()
            loaded = loading.load(serving, self.versions, in_flight=in_flight)
            self.endpoints, serving = asyncio.run(loaded), []
            if not self.endpoints and self.versions.num_updates == 1:
                raise ArtifactError(
                    "no vLLM server takes new weights of this policy, so they cannot sample in "
                    f"training: set engine.name to hf. The reason: {loading.reason}"
                )

    def take_part(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Where another process sends the weights: a sharded one is made by all."""
        for _ in weights.values():
            pass

    def count_update(self, version: int | None, *, in_flight: bool) -> None:
        """Give new weights a name, which all processes know before a server has them."""
        if self.settings.urls:
            raise ArtifactError(NOT_OURS)
        self.versions.count(version, in_flight=in_flight)
        broadcast(None)

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
    try:
        text = await connection.text(f"{connection.endpoint.root}/metrics")
    except (Unavailable, ArtifactError):
        return UNSHARED
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', text)
    shares = re.search(r'cache_config_info\{[^}]*\benable_prefix_caching="True"', text)
    return int(found[1]) if found and shares else UNSHARED


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> ServerEngine:
    """Return the engine for `policy`. Training needs servers that are started here."""
    if settings.urls and settings.num_replicas > 1:
        raise ParamsError(
            "engine.urls names servers and engine.num_replicas starts them: set one of the two"
        )
    if model is not None and settings.urls:
        raise ArtifactError(NOT_OURS)
    if settings.urls:
        return ServerEngine(settings, policy)
    if model is not None:
        check_updates(model)
        check_transfer(settings, num_askers())
    replicas = find_servers(settings, policy, model) if model is None or rank() == 0 else None
    started: list[Endpoint] = []
    if replicas is not None:
        replicas.wait_until_serving()
        started = replicas.wait_for_one()
    prefix = f"{uuid.uuid4().hex[:8]}-" if isinstance(replicas, Borrowed) else ""
    told = (started, prefix) if model is None else agree((started, prefix))
    return ServerEngine(settings, policy, replicas, *told)


def find_servers(
    settings: EngineSettings, policy: Policy, model: PreTrainedModel | None
) -> Servers:
    """Those that the command lends to a trainer, or some that are started here."""
    on_wait = (lambda: None) if model is None else keep_waiting
    if model is not None and SERVERS in os.environ:
        return Borrowed(Path(os.environ[SERVERS]), on_wait)
    if settings.cluster == "local":
        return local(settings, policy, 0 if model is None else num_askers(), on_wait)
    from tasks.engines.cluster.servers import on_cluster

    return on_cluster(settings, settings.cluster, policy)


def from_own_first(endpoints: Sequence[Endpoint], rank: int, size: int) -> list[Endpoint]:
    """The servers in turn, for each of `size` processes from another one on."""
    first = rank * len(endpoints) // size
    return [*endpoints[first:], *endpoints[:first]]
