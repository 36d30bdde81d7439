"""Mark Prefect runs of killed processes as crashed; otherwise they would stay `Running` forever.

A flow run locks a file under `data`, named after its id, while its process lives. The next run of
the project, the schedule and `winnow ui` look for unlocked files. So runs of other projects and
machines are left alone, and no pid is needed. (Heartbeats cover more cases, but need a server that
outlives the runs: see `flows.serve.schedule`.)"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect import get_client, runtime
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from flows.pipeline import commands
from tasks.common.files import held_file
from tasks.common.layout import Layout

logger = logging.getLogger(__name__)

FOLDER = Layout(commands.ROOT / "data").locks / "runs"
MESSAGE = "Its process was killed; the next run resumes."


@contextmanager
def noticed() -> Iterator[None]:
    """During the block, lock a file named after the flow run, so a later run can notice a kill."""
    identity = runtime.flow_run.get_id()
    if not identity:
        yield
        return
    with held_file(FOLDER, identity) as (temporary, _):
        path = FOLDER / identity
        os.replace(temporary, path)  # locked before it is visible
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def mark() -> None:
    """Mark unfinished flow runs of dead processes, and their tasks, as crashed on the server."""
    with get_client(sync_client=True) as client:
        for path in sorted(FOLDER.glob("[!.]*")):
            with suppress(BlockingIOError, FileNotFoundError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(ObjectNotFound):  # a run of another server is marked there
                    mark_run(client, UUID(path.name))
                    path.unlink(missing_ok=True)


def mark_run(client: SyncPrefectClient, identity: UUID) -> None:
    """Mark a flow run's tasks as crashed, then the run. If interrupted, the next call resumes."""
    run = client.read_flow_run(identity)
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[identity]))
    for task in client.read_task_runs(flow_run_filter=of_run):
        if task.state and not task.state.is_final():
            client.set_task_run_state(task.id, Crashed(message=MESSAGE), force=True)
    if run.state and not run.state.is_final():
        client.set_flow_run_state(identity, Crashed(message=MESSAGE), force=True)
        logger.warning("marked as crashed in Prefect: %s", run.name)
