"""The processes of a training on the machines of a cluster: started as torchrun starts them on one
machine, watched, and started again from the last checkpoint when one is lost."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tasks.common import process
from tasks.common.files import ArtifactError, temporary_folder
from tasks.engines.cluster.hosts import HostLostError, Places, RemoteHost
from tasks.engines.cluster.places import PLACES, SharedFolder, training_places
from tasks.engines.engine import Cluster, EngineSettings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
START_SECONDS = 300.0  # for all hosts to be up
GRACE_SECONDS = 60.0  # for the others to end by themselves when one has failed
MAX_RESTARTS = 3  # in a row
LONG_SECONDS = 600.0  # a training that ran so long has not failed in a row


@dataclass
class Ended:
    """How the processes ended: the status of each, None where it was lost or had to be killed."""

    statuses: Sequence[int | None]
    reasons: list[str] = field(default_factory=list)  # of those that were lost

    def is_lost(self, lost_rank: int) -> bool:
        """Whether a process or machine died: the fault need not be the training's."""
        return any(status is None or status < 0 or status == lost_rank for status in self.statuses)

    @property
    def status(self) -> int:
        return next((status for status in self.statuses if status), 0) or 0


def run_ranks(
    settings: EngineSettings, cluster: Cluster, arguments: list[str], lost_rank: int
) -> int:
    """Run `python -m` with these arguments as the `engine.cluster.trainers` ranks of a training.
    Returns its exit status. `lost_rank` is that of a rank that lost another.

    When a rank or its machine dies, all start again, where there is room for them; they go on from
    the last checkpoint. After MAX_RESTARTS times in a row the status is the last one's."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s cluster: %(message)s", datefmt="%H:%M:%S"
    )
    process.interrupt_on_terminate()
    try:
        return supervise(settings, cluster, arguments, lost_rank)
    except ArtifactError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return process.interrupted()


def supervise(
    settings: EngineSettings, cluster: Cluster, arguments: list[str], lost_rank: int
) -> int:
    """See `run_ranks`; interrupts and errors are the caller's."""
    restarts = 0
    with ExitStack() as stack:
        places = training_places(settings, cluster)
        stack.callback(places.close)
        folder = stack.enter_context(temporary_folder(Path(cluster.shared).resolve(), "ranks"))
        shared = SharedFolder(folder)
        while True:
            began = time.monotonic()
            ended = run_once(places, cluster, shared, [sys.executable, "-m", *arguments])
            restarts = restarts + 1 if time.monotonic() - began < LONG_SECONDS else 1
            if not ended.is_lost(lost_rank) or restarts > MAX_RESTARTS:
                return ended.status if all(s is not None for s in ended.statuses) else 1
            logger.warning(
                "%s; all %d start again from the last checkpoint (%d of at most %d times)",
                "; ".join(ended.reasons) or "a rank was lost",
                cluster.trainers,
                restarts,
                MAX_RESTARTS,
            )


def run_once(places: Places, cluster: Cluster, shared: SharedFolder, command: list[str]) -> Ended:
    """Start every rank, and return when all have ended."""
    hosts = [places.host(rank) for rank in range(cluster.trainers)]
    try:
        try:
            start(hosts, places, shared, command)
            return watch(hosts)
        except KeyboardInterrupt:
            interrupt(hosts)
            watch(hosts)
            return Ended([process.interrupted()])
    except HostLostError as error:  # before all were started
        return Ended([None], [str(error)])
    finally:
        for host in hosts:
            host.begin_to_end()
        for host in hosts:
            host.kill()


def start(
    hosts: Sequence[RemoteHost], places: Places, shared: SharedFolder, command: list[str]
) -> None:
    """Start the ranks when all hosts are up. Raises ArtifactError when they are not in
    START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while missing := [str(rank) for rank, host in enumerate(hosts) if not host.is_up()]:
        if time.monotonic() > deadline:
            raise ArtifactError(
                f"no machine of the Ray cluster took rank {', '.join(missing)} in "
                f"{START_SECONDS:.0f} s: a machine may have died, and there is no room elsewhere"
            )
        time.sleep(POLL_SECONDS)
    for host in hosts:
        shared.check(host)
    common = {
        **os.environ,
        "MASTER_ADDR": hosts[0].place().address,
        "MASTER_PORT": str(hosts[0].call("free_port")),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",  # a rank sees its own GPU alone
        PLACES: places.name,
    }
    for rank, host in enumerate(hosts):
        environment = {**common, "RANK": str(rank)}
        host.call("start", command, environment, str(Path.cwd()), is_guarded=False)
        logger.info("rank %d runs on %s", rank, host.place().machine)


def watch(hosts: Sequence[RemoteHost]) -> Ended:
    """Pass on what the ranks write until all have ended. Once one has failed the others have
    GRACE_SECONDS."""
    statuses: dict[int, int | None] = {}
    reasons: list[str] = []
    deadline: float | None = None
    while len(statuses) < len(hosts):
        for rank, host in enumerate(hosts):
            if rank in statuses:
                continue
            try:
                status = show(host)
            except HostLostError as error:
                statuses[rank] = None
                reasons.append(f"rank {rank}: {error}")
                continue
            if status is not None:
                statuses[rank] = status
                if status < 0:
                    reasons.append(f"rank {rank} was killed by signal {-status}")
        if any(status != 0 for status in statuses.values()) and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for rank in set(range(len(hosts))) - set(statuses):
                statuses[rank] = None
                reasons.append(f"rank {rank} did not end")
        time.sleep(POLL_SECONDS)
    return Ended([statuses[rank] for rank in range(len(hosts))], reasons)


def show(host: RemoteHost) -> int | None:
    """Write what a rank has written; its exit status when it has ended and all is written."""
    while True:
        look = host.look()
        if look.output:
            sys.stderr.buffer.write(look.output)
            sys.stderr.flush()
        else:
            return look.status


def interrupt(hosts: Sequence[RemoteHost]) -> None:
    """Ask all ranks to stop after the step in flight."""
    for host in hosts:
        try:
            host.call("interrupt")
        except HostLostError as error:
            logger.warning("%s", error)
