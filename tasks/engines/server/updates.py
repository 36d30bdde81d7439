"""Updates of the weights of servers that were started here: what the weights are called, how they
are put into servers, and that no server answers with others than it should have."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Unavailable
from tasks.engines.loading import num_trainer_gpus
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Completion, Connection, Endpoint
from tasks.engines.server.identity import Identity
from tasks.engines.server.replicas import Servers
from tasks.engines.settings import EngineSettings
from tasks.engines.weights.files import FileTransfer
from tasks.engines.weights.nccl import NcclTransfer
from tasks.models.policy import torch_device, torch_dtype

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Versions:
    """What the weights that servers may have are called, and which version of the policy they are.
    Servers that another process gave weights have some of an unknown version at first, and `prefix`
    sets the names of this process's apart from those."""

    def __init__(self, prefix: str = "") -> None:
        self.num_updates = 0
        self.prefix = prefix
        self.known = {} if prefix else {transfer.INITIAL: 0}
        self.are_swapped = False  # in the middle of completions

    @property
    def current(self) -> str:
        """What servers call the weights that they should have; empty where they may have any."""
        if self.num_updates:
            return f"{self.prefix}{self.num_updates}"
        return "" if self.prefix else transfer.INITIAL

    def count(self, version: int | None, *, in_flight: bool) -> None:
        """Give new weights a name. The names before it are forgotten, unless completions are
        `in_flight`, which may have tokens of older weights."""
        self.num_updates += 1
        if not in_flight:
            self.known.clear()
        self.are_swapped = version is not None
        self.known[self.current] = -1 if version is None else version

    def settle(self) -> None:
        """Forget the names before the current one: nothing is in flight."""
        self.known = {self.current: self.known[self.current]}

    def check(self, endpoint: Endpoint, completion: Completion) -> None:
        """Raise Unavailable where a server wrote tokens with weights that it should not have."""
        for name, _, _ in completion.versions:
            if name not in self.known:
                raise Unavailable(
                    f"{endpoint.url} sampled from weights of version {name!r}, not {self.current!r}"
                )

    def behind(self, completion: Completion) -> list[int]:
        """The policy's version behind each token."""
        found: list[int] = []
        for name, start, end in completion.versions:
            found += [self.known[name]] * (end - start)
        return found


class Loading:
    """Puts weights into servers, and sees that they have them. `identify` is how a server is asked
    for its version and its answer to the probe."""

    def __init__(
        self,
        settings: EngineSettings,
        replicas: Servers,
        identity: Identity,
        identify: Callable[[Connection], Awaitable[Completion]],
    ) -> None:
        self.seconds = settings.timeout_seconds
        self.replicas, self.identity, self.identify = replicas, identity, identify
        self.transfer = transfer_of(settings, replicas)
        self.probe: Completion | None = None  # the answer of a server with the current weights
        self.reason = ""  # what went wrong last

    async def load(
        self, endpoints: Sequence[Endpoint], versions: Versions, *, in_flight: bool = False
    ) -> list[Endpoint]:
        """Put the current weights into some servers, and return those that have them. One that
        fails, or answers a probe unlike the others, is ended; all are when this process fails."""
        try:
            failed = await self.fail(endpoints, versions, in_flight=in_flight)
        except BaseException:
            for endpoint in endpoints:
                self.replicas.drop(endpoint)
            raise
        for endpoint, why in failed.items():
            self.reason = why
            logger.warning("%s; it is ended, and another takes its place", why)
            self.replicas.drop(endpoint)
        return [endpoint for endpoint in endpoints if endpoint not in failed]

    async def fail(
        self, endpoints: Sequence[Endpoint], versions: Versions, *, in_flight: bool
    ) -> dict[Endpoint, str]:
        """Put the current weights into some servers: what went wrong, at those where something
        did."""
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(Connection(endpoint, self.seconds))
                for endpoint in endpoints
            ]
            failed: dict[Endpoint, str] = {}
            if versions.num_updates:
                failed = await self.send(connections, versions.current, in_flight=in_flight)
            ready = [each for each in connections if each.endpoint not in failed]
            found = await asyncio.gather(*(attempt(self.identify(each)) for each in ready))
        for endpoint, answer in zip((each.endpoint for each in ready), found, strict=True):
            why = answer if isinstance(answer, str) else self.compare(endpoint, answer)
            if why is not None:
                failed[endpoint] = why
        return failed

    def compare(self, endpoint: Endpoint, answer: Completion) -> str | None:
        """What is wrong with a server's answer to the probe, beside those of the others; the
        trainer compares them with its own policy."""
        self.probe = self.probe or answer
        if self.identity.agrees(answer, self.probe):
            return None
        return f"{endpoint.url} answers a probe unlike the servers that have the weights"

    async def send(
        self, connections: Sequence[Connection], version: str, *, in_flight: bool
    ) -> dict[Endpoint, str]:
        """Put the current weights into servers: what went wrong, at those where something did."""
        failed: dict[Endpoint, str] = {}

        def without_failed(
            asked: Sequence[Connection], answers: Sequence[str | None]
        ) -> list[Connection]:
            pairs = list(zip(asked, answers, strict=True))
            failed.update({each.endpoint: why for each, why in pairs if why is not None})
            return [each for each, why in pairs if why is None]

        ready = without_failed(connections, await self.transfer.prepare(connections))
        begun = await asyncio.gather(
            *(attempt(transfer.begin(each, in_flight=in_flight)) for each in ready)
        )
        ready = without_failed(ready, begun)
        if ready:
            ready = without_failed(ready, await self.transfer.send(ready))
        ended = await asyncio.gather(*(attempt(transfer.finish(each, version)) for each in ready))
        without_failed(ready, ended)
        return failed


async def attempt(asked: Awaitable[T]) -> T | str:
    """What was asked for, or what went wrong."""
    try:
        return await asked
    except (Unavailable, ArtifactError) as error:
        return str(error)


def transfer_of(settings: EngineSettings, replicas: Servers) -> transfer.Transfer:
    """How new weights reach the servers."""
    dtype = torch_dtype(settings.dtype)
    if settings.weight_transfer == "file":
        return FileTransfer(replicas.folder / "weights", dtype)
    cluster = settings.cluster
    num_gpus = 1 if cluster == "local" else cluster.gpus_per_engine
    return NcclTransfer(num_gpus, dtype, settings.timeout_seconds)


def check_transfer(settings: EngineSettings, num_processes: int) -> None:
    """Raise ParamsError where weights cannot reach servers as is asked for."""
    device = torch_device(settings.device)
    if settings.weight_transfer == "nccl" and not num_trainer_gpus(settings, num_processes, device):
        raise ParamsError(
            "engine.weight_transfer is nccl, which needs a GPU for every process that trains and "
            "others for the servers: set it to file"
        )
