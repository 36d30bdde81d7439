"""Servers that belong to the command that starts a training run, and are lent to the run's
processes. If a process dies, the servers stay up, and the next processes load their own weights.

The command and the first process communicate through the folder of new weights: the command writes
the endpoints of the servers, and the process writes the names of servers to stop."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.files import read_json, write_json
from tasks.common.progress import progress
from tasks.engines.engine import NoServerError, attempt
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Connection, Endpoint
from tasks.engines.server.replicas import POLL_SECONDS, START_SECONDS, Replicas
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy

if TYPE_CHECKING:
    from tasks.engines.cluster.hosts import Places

logger = logging.getLogger(__name__)

SERVERS = "WINNOW_SERVERS"  # environment variable with the folder's path
LEAVE_SECONDS = 60.0  # for a step of `leave_update`; a broadcast by NCCL may never end
OFFERED, REFUSED = "offered.json", "refused"


class Lender:
    """The servers, as managed by the command that starts a training run."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas, self.folder = replicas, replicas.folder
        self.offered: list[Endpoint] = []
        self.written: Any = None
        self.environment = {SERVERS: str(self.folder)}  # for the processes
        self.close = replicas.close
        (self.folder / REFUSED).mkdir()

    def tend(self) -> None:
        """Stop the servers that the run rejected, restart exited ones, and write the endpoints of
        those that serve. If one does not start, raise ArtifactError with the end of its log."""
        for path in (self.folder / REFUSED).iterdir():
            self.drop([each for each in self.offered if each.name == path.name])
            path.unlink()
        num_starting = self.replicas.num_starting()
        self.replicas.revive()
        self.offered = self.replicas.serving(self.offered)
        state = {
            "num": self.replicas.num,
            "num_starting": num_starting,
            "endpoints": [
                {"url": each.url, "name": each.name, "key": each.key} for each in self.offered
            ],
        }
        if state != self.written:
            write_json(self.folder / OFFERED, state)
            self.written = state

    def reclaim(self) -> None:
        """Prepare the servers for another process: the previous one may have left them in the
        middle of an update. Stop servers that cannot leave that update. Raise ArtifactError if no
        server remains, and all have been restarted too often."""
        self.drop(asyncio.run(unfit(self.offered)))
        if not self.replicas.starting and not self.offered:
            self.replicas.wait_for_one()
        self.tend()

    def drop(self, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            self.replicas.drop(endpoint)
        self.offered = [each for each in self.offered if each not in endpoints]


def lend(
    settings: EngineSettings, policy: Policy, places: "Places", first: int, logs: Path
) -> Lender:
    """Start servers of a policy on the machines of a cluster, in `places` from index `first` on,
    and return without waiting for them. Their logs are kept under `logs`."""
    from tasks.engines.cluster.servers import on_cluster

    assert settings.cluster != "local"
    return Lender(on_cluster(settings, settings.cluster, policy, places, first, logs))


async def unfit(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Return the servers that fail to end an interrupted update."""

    async def leave_update(endpoint: Endpoint) -> None:
        async with Connection(endpoint, LEAVE_SECONDS) as connection:
            await transfer.leave_update(connection)

    found = await asyncio.gather(*(attempt(leave_update(each)) for each in endpoints))
    failed = {each: why for each, why in zip(endpoints, found, strict=True) if isinstance(why, str)}
    for why in failed.values():
        logger.warning("%s; replacing it with another server", why)
    return list(failed)


class Borrowed:
    """The servers, as used by the first process of a training run instead of `Replicas`. They may
    have any weights at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: set[str] = set()

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.folder / OFFERED)
        return found

    @property
    def num(self) -> int:
        return int(self.read()["num"])

    def num_starting(self) -> int:
        """See `Replicas`. The command stops this process if a server does not start."""
        return int(self.read()["num_starting"])

    def serving(self, known: Collection[Endpoint] = ()) -> list[Endpoint]:
        offered = [Endpoint(**values) for values in self.read()["endpoints"]]
        return [each for each in offered if each.name not in self.refused]

    def wait_for_one(self) -> list[Endpoint]:
        """Wait until at least one server is up, and return all that are up. Raise NoServerError
        after START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := self.serving()):
            if time.monotonic() > deadline:
                raise NoServerError(f"no vLLM server responded in {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        return found

    def drop(self, endpoint: Endpoint) -> None:
        """Request that the command stop a server. The command starts another one."""
        self.refused.add(endpoint.name)
        (self.folder / REFUSED / endpoint.name).touch()

    def revive(self) -> None:
        """Do nothing: the command restarts servers."""

    def close(self) -> None:
        """Do nothing: the command keeps the servers."""


Servers = Replicas | Borrowed
"""Servers that a process may update, end and restart."""


def wait_until_serving(servers: Servers) -> None:
    """Wait until every server has responded once."""
    with progress(servers.num, "start vLLM servers", "server") as bar:
        while num_starting := servers.num_starting():
            bar.update(servers.num - num_starting - bar.n)
            time.sleep(POLL_SECONDS)
