"""Weight updates of servers that were started here: the names of the weights, the update, and the
checks that no server samples with other weights."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.common.params import ParamsError
from tasks.engines.engine import Unavailable, attempt
from tasks.engines.loading import num_trainer_gpus
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Completion, Connection, Endpoint
from tasks.engines.server.identity import Identity
from tasks.engines.settings import EngineSettings
from tasks.engines.weights.files import FileTransfer
from tasks.engines.weights.nccl import NcclTransfer
from tasks.models.policy import Policy, torch_device, torch_dtype

if TYPE_CHECKING:
    from tasks.engines.server.lending import Servers

logger = logging.getLogger(__name__)

Transfer = FileTransfer | NcclTransfer
"""The transfer of weights to servers that are ready for them. If it `repeats`, servers can get the
same weights again later."""


class Versions:
    """The names of the weights that servers may have, and the policy's version for each name.
    Servers with weights from another process have an unknown version at first. `prefix`
    distinguishes this process's names from the other process's."""

    def __init__(self, prefix: str = "") -> None:
        self.num_updates = 0
        self.prefix = prefix
        self.known = {} if prefix else {transfer.INITIAL: 0}
        self.are_swapped = False  # whether the last swap or update came with a policy version

    @property
    def current(self) -> str:
        """The name of the weights that servers should have; empty if they may have any weights."""
        if self.num_updates:
            return f"{self.prefix}{self.num_updates}"
        return "" if self.prefix else transfer.INITIAL

    def count(self, version: int | None, *, in_flight: bool) -> None:
        """Name the new weights, those of the policy's `version` (None: unknown). Forget the earlier
        names, unless completions are `in_flight`: these may have tokens of older weights."""
        self.num_updates += 1
        if not in_flight:
            self.known.clear()
        self.are_swapped = version is not None
        self.known[self.current] = -1 if version is None else version

    def settle(self) -> None:
        """Forget the names of all previous weights. No completion may be in flight."""
        self.known = {self.current: self.known[self.current]}

    def check(self, endpoint: Endpoint, completion: Completion) -> None:
        """Raise Unavailable if a server sampled tokens with weights that it should not have."""
        for name, _, _ in completion.versions:
            if name not in self.known:
                raise Unavailable(
                    f"{endpoint.url} sampled from weights of version {name!r}, not {self.current!r}"
                )

    def behind(self, completion: Completion) -> list[int]:
        """Return the policy's version for each token of a completion."""
        found: list[int] = []
        for name, start, end in completion.versions:
            found += [self.known[name]] * (end - start)
        return found


class Loading:
    """Loads weights into servers and checks them there. A request may take up to `seconds`.
    `identify` checks a server's version, and returns its completion of the probe."""

    def __init__(
        self,
        seconds: float,
        replicas: "Servers",
        identity: Identity,
        transfer: Transfer,
        identify: Callable[[Connection], Awaitable[Completion]],
    ) -> None:
        self.seconds, self.replicas, self.transfer = seconds, replicas, transfer
        self.identity, self.identify = identity, identify
        self.probe: Completion | None = None  # the answer of a server with the current weights
        self.reason = ""  # of the last failure

    async def load(
        self, endpoints: Sequence[Endpoint], versions: Versions, *, in_flight: bool = False
    ) -> list[Endpoint]:
        """Load the current weights into servers, and return those that succeed. Stop servers that
        fail, or whose probe differs from the others'. If this process fails, stop all of them."""
        try:
            failed = await self.fail(endpoints, versions, in_flight=in_flight)
        except BaseException:
            for endpoint in endpoints:
                self.replicas.drop(endpoint)
            raise
        for endpoint, why in failed.items():
            self.reason = why
            logger.warning("%s; replacing it with another server", why)
            self.replicas.drop(endpoint)
        return [endpoint for endpoint in endpoints if endpoint not in failed]

    async def fail(
        self, endpoints: Sequence[Endpoint], versions: Versions, *, in_flight: bool
    ) -> dict[Endpoint, str]:
        """Load the current weights into some servers, and check them there. Return the reason for
        each failed server."""
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(Connection(endpoint, self.seconds))
                for endpoint in endpoints
            ]
            failed: dict[Endpoint, str] = {}
            if versions.num_updates:
                failed = await self.send(connections, versions.current, in_flight=in_flight)
            ready = [each for each in connections if each.endpoint not in failed]
            identities = await asyncio.gather(*(attempt(self.identify(each)) for each in ready))
        answers = [each for each in identities if isinstance(each, Completion)]
        self.probe = self.probe or self.most_common(answers)
        for endpoint, answer in zip((each.endpoint for each in ready), identities, strict=True):
            why = answer if isinstance(answer, str) else self.compare(endpoint, answer)
            if why is not None:
                failed[endpoint] = why
        return failed

    def most_common(self, answers: Sequence[Completion]) -> Completion | None:
        """Return the completion of the probe that most servers agree with, None if all failed."""
        agrees = self.identity.agrees
        return max(answers, key=lambda one: sum(agrees(one, a) for a in answers), default=None)

    def compare(self, endpoint: Endpoint, answer: Completion) -> str | None:
        """Return how a server's completion of the probe differs from that of a server with the new
        weights, or None. Whether the new weights are the policy's is not checked here."""
        if self.probe is None or self.identity.agrees(answer, self.probe):
            return None
        return f"{endpoint.url} responds to a probe differently from servers with the new weights"

    async def send(
        self, connections: Sequence[Connection], version: str, *, in_flight: bool
    ) -> dict[Endpoint, str]:
        """Send the current weights to servers. Return the reason for each server that failed."""
        begin = partial(attempt_at_each, partial(transfer.begin, in_flight=in_flight))
        finish = partial(attempt_at_each, partial(transfer.finish, version=version))
        failed: dict[Endpoint, str] = {}
        for step in (self.transfer.prepare, begin, self.transfer.send, finish):
            ready = [each for each in connections if each.endpoint not in failed]
            answers = await step(ready) if ready else []
            pairs = zip(ready, answers, strict=True)
            failed |= {each.endpoint: why for each, why in pairs if why is not None}
        return failed


async def attempt_at_each(
    ask: Callable[[Connection], Awaitable[None]], connections: Sequence[Connection]
) -> list[str | None]:
    """Send a request to every server. Return each server's failure, or None."""
    return await asyncio.gather(*(attempt(ask(each)) for each in connections))


def transfer_of(settings: EngineSettings, policy: Policy, folder: Path) -> Transfer:
    """Return the transfer that `engine.weight_transfer` names, with files below `folder`."""
    dtype, method = torch_dtype(settings.dtype), settings.weight_transfer
    if method != "nccl":
        only_changes = method == "delta"
        return FileTransfer(folder / "weights", policy.folder, dtype, only_changes=only_changes)
    cluster = settings.cluster
    num_gpus = settings.num_parts if cluster == "local" else cluster.gpus_per_engine
    return NcclTransfer(num_gpus, dtype, settings.timeout_seconds)


def check_transfer(settings: EngineSettings, num_processes: int) -> None:
    """Raise ParamsError if `engine.weight_transfer` cannot work with these devices."""
    device = torch_device(settings.device)
    if settings.weight_transfer == "nccl" and not num_trainer_gpus(settings, num_processes, device):
        raise ParamsError(
            "engine.weight_transfer is nccl, which needs a GPU for every training process and "
            "further GPUs for the servers: set it to file or delta"
        )
