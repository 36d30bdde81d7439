"""Servers that the command which started a training keeps, and lends to the training's processes.
When one of those dies the servers stay up, and the next ones give them their own weights.

Command and first process meet in the folder through which new weights pass: the command writes
where the servers are, and the process which of them must be ended."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.files import read_json, write_json
from tasks.common.progress import progress
from tasks.engines.engine import NoServerError
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Connection, Endpoint
from tasks.engines.server.replicas import POLL_SECONDS, START_SECONDS, Replicas
from tasks.engines.server.updates import attempt
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy

if TYPE_CHECKING:
    from tasks.engines.cluster.hosts import Places

logger = logging.getLogger(__name__)

SERVERS = "WINNOW_SERVERS"  # the folder, for the processes
LEAVE_SECONDS = 60.0  # for a step on the way out of an update; a broadcast by NCCL has no end
OFFERED, REFUSED = "offered.json", "refused"


class Lender:
    """The command's side."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas, self.folder = replicas, replicas.folder
        self.offered: list[Endpoint] = []
        self.written: Any = None
        self.environment = {SERVERS: str(self.folder)}  # of the processes
        self.close = replicas.close
        (self.folder / REFUSED).mkdir()

    def tend(self) -> None:
        """End the servers that were refused, start again what has ended, and write where the
        others are. Raises ArtifactError with the end of its log when a server does not start."""
        for path in (self.folder / REFUSED).iterdir():
            self.drop([each for each in self.offered if each.name == path.name])
            path.unlink()
        self.replicas.check_starts()
        self.replicas.revive()
        self.offered = self.replicas.serving(self.offered)
        self.write()

    def write(self) -> None:
        """Write where the servers are, if that has changed."""
        state = {
            "num": self.replicas.num,
            "num_starting": len(self.replicas.starting),
            "endpoints": [
                {"url": each.url, "name": each.name, "key": each.key} for each in self.offered
            ],
        }
        if state != self.written:
            write_json(self.folder / OFFERED, state)
            self.written = state

    def take_back(self) -> None:
        """Make the servers ready for another process: one may have left them in the middle of an
        update. Those that fail are ended. Raises ArtifactError when none is left, and all have
        ended too often."""
        self.drop(asyncio.run(unfit(self.offered)))
        if not self.replicas.starting and not self.offered:
            self.replicas.wait_for_one()
        self.tend()

    def drop(self, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            self.replicas.drop(endpoint)
        self.offered = [each for each in self.offered if each not in endpoints]


def lend(settings: EngineSettings, policy: Policy, places: "Places", first: int) -> Lender:
    """Servers of a policy on the machines of a cluster, in its places from the `first` on, which
    are being started."""
    from tasks.engines.cluster.servers import on_cluster

    assert settings.cluster != "local"
    return Lender(on_cluster(settings, settings.cluster, policy, places, first))


async def unfit(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """The servers that cannot get new weights."""

    async def leave_update(endpoint: Endpoint) -> None:
        async with Connection(endpoint, LEAVE_SECONDS) as connection:
            await transfer.leave_update(connection)

    found = await asyncio.gather(*(attempt(leave_update(each)) for each in endpoints))
    failed = {each: why for each, why in zip(endpoints, found, strict=True) if isinstance(why, str)}
    for why in failed.values():
        logger.warning("%s; it is ended, and another takes its place", why)
    return list(failed)


class Borrowed:
    """The side of the first process, in the place of `Replicas`. Its servers may have any
    weights."""

    def __init__(self, folder: Path, on_wait: Callable[[], object]) -> None:
        self.folder, self.on_wait = folder, on_wait
        self.refused: set[str] = set()

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.folder / OFFERED)
        return found

    @property
    def num(self) -> int:
        return int(self.read()["num"])

    def wait_until_serving(self) -> None:
        """Return when every server has answered once. The command ends this process when one does
        not."""
        with progress(self.num, "start vLLM servers", "server") as bar:
            while num_starting := self.read()["num_starting"]:
                bar.update(self.num - num_starting - bar.n)
                self.on_wait()
                time.sleep(POLL_SECONDS)

    def serving(self, known: Collection[Endpoint] = ()) -> list[Endpoint]:
        offered = [Endpoint(**values) for values in self.read()["endpoints"]]
        return [each for each in offered if each.name not in self.refused]

    def wait_for_one(self) -> list[Endpoint]:
        """As `serving`, when at least one server is up. Raises NoServerError when none is in
        START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := self.serving()):
            if time.monotonic() > deadline:
                raise NoServerError(f"no vLLM server answered in {START_SECONDS:.0f} s")
            self.on_wait()
            time.sleep(POLL_SECONDS)
        return found

    def drop(self, endpoint: Endpoint) -> None:
        """Have the command end a server; another takes its place."""
        self.refused.add(endpoint.name)
        (self.folder / REFUSED / endpoint.name).touch()

    def revive(self) -> None:
        """The command does so."""

    def close(self) -> None:
        """The command keeps the servers."""
