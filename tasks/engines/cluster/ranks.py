"""The processes of a training on the machines of a cluster: started as torchrun starts them on one
machine, watched, and started again from the last checkpoint when one is lost. The servers that they
sample from are started once, and stay up meanwhile (`server/lending.py`)."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import engines
from tasks.common import process, registry
from tasks.common.files import ArtifactError
from tasks.engines.cluster.hosts import HostLostError, Places, RemoteHost
from tasks.engines.cluster.places import SharedFolder, shared_folder, training_places
from tasks.engines.loading import engine_name
from tasks.engines.settings import Cluster, EngineSettings
from tasks.models.policy import Policy

if TYPE_CHECKING:  # the code of servers counts in the digests of those stages alone that use them
    from tasks.engines.server.lending import Lender

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
START_SECONDS = 300.0  # for all hosts to be up
GRACE_SECONDS = 60.0  # for the others to end by themselves when one has failed
STOP_SECONDS = 600.0  # for the step in flight and its checkpoint, when interrupted
MAX_RESTARTS = 3  # without a new checkpoint in between


@dataclass
class Ended:
    """How the processes ended: the status of each, None where it was lost or had to be killed, and
    of those that failed the ones that were first."""

    statuses: Sequence[int | None]
    first: Sequence[int | None] = ()
    reasons: list[str] = field(default_factory=list)  # of those that were lost

    def is_lost(self, lost_rank: int) -> bool:
        """Whether a process or machine died first, or is silent: the fault need not be the
        training's. What a rank raised by itself it would raise again."""
        died = any(status is None or status < 0 for status in self.first)
        own = any(status is not None and 0 < status != lost_rank for status in self.first)
        return died or (bool(self.first) and not own)

    @property
    def status(self) -> int:
        """The exit status of the whole."""
        failed = [status for status in (*self.first, *self.statuses) if status != 0]
        given = [status for status in failed if status is not None and status > 0]
        return min(given, default=1 if failed else 0)  # LOST_RANK is the largest


def run_ranks(
    settings: EngineSettings,
    cluster: Cluster,
    arguments: list[str],
    lost_rank: int,
    progress: Callable[[], object],
    policy: Callable[[], Policy],
) -> int:
    """Run `python -m` with these arguments as the `engine.cluster.trainers` ranks of a training,
    beside servers of the policy. Returns its exit status. `lost_rank` is that of a rank that lost
    another.

    When a rank or its machine dies, all start again, where there is room for them; they go on from
    the last checkpoint. After MAX_RESTARTS times in which `progress` stayed what it was, the status
    is the last one's."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s cluster: %(message)s", datefmt="%H:%M:%S"
    )
    process.interrupt_on_terminate()
    command = [sys.executable, "-m", *arguments]
    try:
        with ExitStack() as stack:
            places = training_places(settings, cluster)
            stack.callback(places.close)
            folder = stack.enter_context(shared_folder(cluster, "ranks"))
            lender: Lender | None = None
            if cluster.engines:
                server = registry.load(engines, engine_name(settings), "engine.name")
                lender = server.lend(settings, policy(), places, cluster.trainers)
                stack.callback(lender.close)
            run = partial(run_once, places, cluster, SharedFolder(folder), command, lender)
            return supervise(run, lost_rank, progress)
    except ArtifactError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return process.interrupted()


def supervise(run: Callable[[], Ended], lost_rank: int, progress: Callable[[], object]) -> int:
    """Run all ranks until they end by themselves, or have been lost too often: the status."""
    restarts = 0
    while True:
        before = progress()
        ended = run()
        restarts = restarts + 1 if progress() == before else 1
        if not ended.is_lost(lost_rank) or restarts > MAX_RESTARTS:
            return ended.status
        logger.warning(
            "%s; all ranks start again from the last checkpoint (%d of at most %d times)",
            "; ".join(ended.reasons) or "a rank was lost",
            restarts,
            MAX_RESTARTS,
        )


def run_once(
    places: Places,
    cluster: Cluster,
    shared: SharedFolder,
    command: list[str],
    lender: "Lender | None" = None,
) -> Ended:
    """Start every rank, and return when all have ended. The servers of the `lender`, if there is
    one, are looked after meanwhile."""
    hosts = [places.host(rank) for rank in range(cluster.trainers)]

    def tend() -> None:
        places.look_at_head()
        if lender:
            lender.tend()

    environment = {**os.environ, **(lender.environment if lender else {})}
    try:
        try:
            if lender:
                lender.take_back()
            start(hosts, shared, command, environment, tend)
        except HostLostError as error:
            return Ended([None], [None], [str(error)])
        try:
            return watch(hosts, tend)
        except KeyboardInterrupt:  # another one ends the ranks at once
            interrupt(hosts)
            watch(hosts, tend, STOP_SECONDS)
            raise
    finally:
        for host in hosts:
            host.begin_to_end()
        for host in hosts:
            host.kill()


def start(
    hosts: Sequence[RemoteHost],
    shared: SharedFolder,
    command: list[str],
    environment: Mapping[str, str],
    tend: Callable[[], object],
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
        tend()
        time.sleep(POLL_SECONDS)
    for host in hosts:
        shared.check(host)
    common = {
        **environment,
        "MASTER_ADDR": hosts[0].place().address,
        "MASTER_PORT": str(hosts[0].call("free_port")),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",  # a rank sees its own GPU alone
    }
    for rank, host in enumerate(hosts):
        own = {**common, "RANK": str(rank)}
        host.call("start", command, own, str(Path.cwd()), is_guarded=False)
        logger.info("rank %d runs on %s", rank, host.place().machine)


def watch(
    hosts: Sequence[RemoteHost], tend: Callable[[], object], seconds: float | None = None
) -> Ended:
    """Pass on what the ranks write until all have ended, or have had so many `seconds`. Once one
    has failed the others have GRACE_SECONDS."""
    statuses: dict[int, int | None] = {}
    first: list[int | None] = []
    reasons: list[str] = []
    deadline = None if seconds is None else time.monotonic() + seconds
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
        if not first and (first := [status for status in statuses.values() if status != 0]):
            grace = time.monotonic() + GRACE_SECONDS
            deadline = grace if deadline is None else min(deadline, grace)
        if deadline is not None and time.monotonic() > deadline:
            for rank in set(range(len(hosts))) - set(statuses):
                statuses[rank] = None
                reasons.append(f"rank {rank} did not end")
        tend()
        time.sleep(POLL_SECONDS)
    return Ended([statuses[rank] for rank in range(len(hosts))], first, reasons)


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
