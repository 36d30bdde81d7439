"""The ranks of a training run on the machines of a cluster. They start with the environment
variables that torchrun sets. If one is lost, all restart from the last checkpoint. The servers that
they sample from are started once, and stay up across restarts (`server/lending.py`)."""

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
from tasks.common import registry
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.common.processes import ending
from tasks.engines.cluster.hosts import HostLostError, Places, RemoteHost
from tasks.engines.cluster.places import check_shared, reserve_places, shared_folder
from tasks.engines.loading import engine_name
from tasks.engines.settings import Cluster, EngineSettings
from tasks.models.policy import Policy

if TYPE_CHECKING:  # only stages that use servers include the servers' code in their digests
    from tasks.engines.server.lending import Lender

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
START_SECONDS = 300.0  # for all hosts to be up
GRACE_SECONDS = 60.0  # for the other ranks to end by themselves after one has failed
STOP_SECONDS = 600.0  # for the step in flight and its checkpoint, when interrupted
MAX_RESTARTS = 3  # without a new checkpoint in between


@dataclass
class Ended:
    """The exit status of each process (None if it was lost or had to be killed), and the statuses
    of the processes that failed first."""

    statuses: Sequence[int | None]
    first: Sequence[int | None] = ()
    reasons: list[str] = field(default_factory=list)  # of lost processes

    def is_lost(self, lost_rank: int) -> bool:
        """Return whether a restart may help: whether a process or machine died or did not respond.
        A rank's own error (a positive status other than `lost_rank`) would recur."""
        died = any(status is None or status < 0 for status in self.first)
        own = any(status is not None and 0 < status != lost_rank for status in self.first)
        return died or (bool(self.first) and not own)

    @property
    def status(self) -> int:
        """The exit status of the training run."""
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
    logs: Path,
) -> int:
    """Run `python -m` with `arguments` as each of the `engine.cluster.trainers` ranks of a training
    run. Start the policy's servers for it, with logs under `logs`. Return the run's exit status.
    `lost_rank` is the exit status of a rank that failed because another was lost.

    If a rank or its machine dies, all ranks restart on machines with room for them, and continue
    from the last checkpoint. After MAX_RESTARTS restarts without a change of `progress()`, return
    the last status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s cluster: %(message)s", datefmt="%H:%M:%S"
    )
    ending.interrupt_on_terminate()
    command = [sys.executable, "-m", *arguments]
    try:
        with ExitStack() as stack:
            places = reserve_places(settings, cluster, cluster.trainers)
            stack.callback(places.close)
            folder = stack.enter_context(shared_folder(cluster, "ranks"))
            lender: Lender | None = None
            if cluster.engines:
                server = registry.load(engines, engine_name(settings), "engine.name")
                lender = server.lend(settings, policy(), places, cluster.trainers, logs)
                stack.callback(lender.close)
            run = partial(run_once, places, cluster, folder, command, lender)
            return supervise(run, lost_rank, progress)
    except (ArtifactError, ParamsError) as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return ending.interrupted()


def supervise(run: Callable[[], Ended], lost_rank: int, progress: Callable[[], object]) -> int:
    """Run all ranks until they exit or have been lost too often. Return the exit status."""
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
    folder: Path,
    command: list[str],
    lender: "Lender | None" = None,
) -> Ended:
    """Start every rank, and return when all have ended. Meanwhile the `lender`, if there is one,
    restarts servers that have ended. All machines must share `folder`."""
    hosts = [places.host(rank) for rank in range(cluster.trainers)]

    def tend() -> None:
        places.check_head_at_intervals()
        if lender:
            lender.tend()

    environment = {**os.environ, **(lender.environment if lender else {})}
    try:
        try:
            if lender:
                lender.reclaim()
            start(hosts, folder, command, environment, tend)
        except HostLostError as error:
            return Ended([None], [None], [str(error)])
        try:
            return watch(hosts, tend)
        except KeyboardInterrupt:  # a second interrupt ends the ranks at once
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
    folder: Path,
    command: list[str],
    environment: Mapping[str, str],
    tend: Callable[[], object],
) -> None:
    """Wait until all hosts are up, calling `tend` meanwhile, then start the ranks. Raise
    ArtifactError if a host is not up within START_SECONDS, or cannot read `folder`."""
    deadline = time.monotonic() + START_SECONDS
    while missing := [str(rank) for rank, host in enumerate(hosts) if not host.is_up()]:
        if time.monotonic() > deadline:
            raise ArtifactError(
                f"no machine of the Ray cluster started rank {', '.join(missing)} in "
                f"{START_SECONDS:.0f} s: a machine may have died, and the others have no room"
            )
        tend()
        time.sleep(POLL_SECONDS)
    for host in hosts:
        check_shared(host, folder)
    common = {
        **environment,
        "MASTER_ADDR": hosts[0].place().address,
        "MASTER_PORT": str(hosts[0].call("free_port")),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",  # a rank sees only its own GPU
    }
    for rank, host in enumerate(hosts):
        own = {**common, "RANK": str(rank)}
        host.call("start", command, own, str(Path.cwd()), is_guarded=False)
        logger.info("rank %d runs on %s", rank, host.place().machine)


def watch(
    hosts: Sequence[RemoteHost], tend: Callable[[], object], seconds: float | None = None
) -> Ended:
    """Write the ranks' output to stderr until all exit, for at most `seconds`, and at most
    GRACE_SECONDS after a failure. A rank that is lost, or runs longer, gets the status None."""
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
    """Write a rank's new output. Return its exit status, or None while it runs."""
    while True:
        progress = host.poll()
        if progress.output:
            sys.stderr.buffer.write(progress.output)
            sys.stderr.flush()
        else:
            return progress.status


def interrupt(hosts: Sequence[RemoteHost]) -> None:
    """Send SIGTERM to all ranks: they stop after the step in flight."""
    for host in hosts:
        try:
            host.call("interrupt")
        except HostLostError as error:
            logger.warning("%s", error)
