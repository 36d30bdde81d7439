"""A stage's records in Prefect's UI: its output as the log of its task run, its progress bars, and
the leaderboard. A server that does not respond never stops a stage."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect import Flow, artifacts, get_client, runtime
from prefect.blocks.core import Block
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from flows.pipeline import commands, status
from flows.pipeline.output import Output
from flows.pipeline.roots import Root
from flows.pipeline.selection import upstream
from flows.pipeline.stages import Stages

logger = logging.getLogger(__name__)

LINES_A_LOOK = 50
PROGRESS_SECONDS = 5.0
MAX_NAME = 120
NOTIFY = "WINNOW_NOTIFY"

cancelled: set[str] = set()  # runs of this process cancelled in Prefect
one_signal = threading.Lock()  # each stage has a thread, and a second signal would kill the stages


class Watch:
    """Passes on a stage's output, in its task's thread. Each call logs new lines. Every few seconds
    a call also shows progress in Prefect, and interrupts this process if the run is cancelled."""

    def __init__(self, title: str) -> None:
        self.title, self.log = title, get_run_logger()
        self.bars: dict[str, UUID] = {}
        self.seen: dict[str, float] = {}
        self.next_progress = time.monotonic() + PROGRESS_SECONDS
        status.note(title)

    def __call__(self, output: Output) -> None:
        for line in output.lines.take(LINES_A_LOOK):
            self.log.info("%s", line)
        if time.monotonic() >= self.next_progress:
            with suppress(Exception):  # another function reports a server that has ended
                stop_if_cancelled()
            self.show_bars(output)  # may be slow, if the server is
            self.next_progress = time.monotonic() + PROGRESS_SECONDS

    def finish(self, output: Output) -> None:
        """Pass on the last lines and remove the bars: a stage that has ended has no progress."""
        self(output)
        status.note(self.title, None)
        attempt(self.remove_bars)

    def remove_bars(self) -> None:
        if self.bars:
            with get_client(sync_client=True) as client:
                for identity in self.bars.values():
                    client.delete_artifact(identity)

    def show_bars(self, output: Output) -> None:
        for label, (percent, text) in list(output.lines.bars.items()):
            if self.seen.get(label) != percent:
                self.seen[label] = percent
                status.note(self.title, text)
                attempt(lambda: self.show(label, percent, text))  # noqa: B023

    def show(self, label: str, percent: float, text: str) -> None:
        if label in self.bars:
            artifacts.update_progress_artifact(self.bars[label], progress=percent, description=text)
        else:
            found: Any = artifacts.create_progress_artifact(
                percent, key=key(f"{self.title} {label}"), description=text
            )
            self.bars[label] = found


def stop_if_cancelled() -> None:
    """Interrupt this process, as Ctrl-C does, if its run is cancelled in Prefect. Skip a run that a
    runner (`winnow serve`, a worker) started: the runner stops it."""
    identity = runtime.flow_run.get_id()
    if identity and status.RUNNER not in os.environ and identity not in cancelled:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(identity)).state
        is_cancelled = state is not None and state.type is StateType.CANCELLING
        with one_signal:
            if is_cancelled and identity not in cancelled:
                cancelled.add(identity)
                os.kill(os.getpid(), signal.SIGINT)


def end_cancelled() -> None:
    """Set the runs in `cancelled` to the final state Cancelled in Prefect, not Crashed."""
    with get_client(sync_client=True) as client:
        for identity in cancelled:
            client.set_flow_run_state(UUID(identity), Cancelled(), force=True)


def forecast_of(stages: Stages) -> str:
    """Return the maximum number of stages that will run, and the reason for the first of them."""
    stale = [stage for stage in stages.ordered if stage in stages.stale]
    if not stale:
        return "nothing to do"
    most = [s for s in stages.ordered if upstream(stages.needs, {s}) & stages.stale]
    first, reasons = "code", stages.code_reason
    if not reasons:
        first = stale[0]
        reasons = stages.reason(first, stages.changed.get(first, []))
    return f"up to {len(most)} of {len(stages.ordered)} stages · {first}: {first_of(reasons)}"


def name_run(request: str, what: str) -> None:
    """Name the flow run after what was requested, and what will run or ran."""
    name = f"{request} · {what}"
    identity = runtime.flow_run.get_id()
    if identity:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(identity), name=name[:MAX_NAME])


def first_of(reasons: str) -> str:
    first, _, more = reasons.partition("; ")
    return f"{first}, ..." if more else first


def notify(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Report a failed or crashed run through the notification block that WINNOW_NOTIFY names, such
    as `slack-webhook/winnow`."""
    if slug := os.environ.get(NOTIFY):
        with get_client(sync_client=True) as client:
            name = client.read_flow_run(flow_run.id).name  # the run was renamed after its start
        block: Any = Block.load(slug)
        block.notify(subject=f"{flow.name}: {name}: {state.name}", body=state.message or "")


def attempt(record: Callable[[], object]) -> None:
    try:
        record()
    except Exception as error:
        logger.warning("not recorded in Prefect: %r", error)


def key(text: str) -> str:
    """Return the key of this project's artifact `text`: in lower case, with `-` for characters
    not allowed."""
    return re.sub(r"[^a-z0-9]+", "-", f"{commands.NAME} {text}".lower()).strip("-")


def leaderboard(root: Root) -> None:
    """Record the leaderboard as the terminal shows it, and the path of the report."""
    try:
        text = (root.layout.report / "leaderboard.txt").read_text()
    except OSError as error:
        logger.warning("no leaderboard of %s in Prefect: %s", root.titled("report"), error)
        return
    report = (root.layout.report / "index.html").resolve()
    attempt(
        lambda: artifacts.create_markdown_artifact(
            f"```\n{text.rstrip()}\n```\n\nThe report: `{report}`\n",
            key=key(root.titled("leaderboard")),
        )
    )
