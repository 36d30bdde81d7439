"""What a flow run leaves behind for people: its run in MLflow, and the last lines on the
terminal."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flows import commands, server
from flows.selection import coordinates
from flows.stages import Stages
from tasks.common import params
from tasks.common.layout import Layout


@contextmanager
def recorded(layout: Layout, stages: Stages) -> Iterator[None]:
    """One parent run in MLflow for the stages that run meanwhile, linked to what was cached."""
    from tasks.common import tracking  # a run that has nothing to do needs none of it

    identity = tracking.start_pipeline(layout)
    os.environ[tracking.PIPELINE_VARIABLE] = identity
    status = "KILLED"
    try:
        yield
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        del os.environ[tracking.PIPELINE_VARIABLE]
        settings = params.section(
            params.load(commands.ROOT / "params.yaml"), "tracking", tracking.Tracking
        )
        cached = [
            coordinates(stage) for stage, outcome in stages.outcomes.items() if outcome == "Cached"
        ]
        tracking.end_pipeline(settings, layout, identity, status, cached)


def conclusion(stages: Stages) -> str:
    """What happened, in one sentence."""
    if stages.idle:
        return f"nothing to do: all {len(stages.ordered)} stages are up to date"
    counts = [
        (name, list(stages.outcomes.values()).count(name))
        for name in ("Ran", "Restored", "Cached", "Failed")
    ]
    not_run = len(stages.ordered) - len(stages.outcomes)
    words = [
        f"{number} {name.lower()}" for name, number in [*counts, ("not run", not_run)] if number
    ]
    return f"{len(stages.ordered)} stages: {', '.join(words)}"


def left_out(stages: Stages) -> str:
    """What a restriction to some cells did not look at, and why the report is among it."""
    names = ", ".join(stages.left_out)
    return f"left out: {names}" + (
        " (the report waits for all cells)" if "report" in stages.left_out else ""
    )


def places(layout: Layout) -> str:
    """The result, and where more is to be seen."""
    table = layout.report / "leaderboard.txt"
    benchmarks = importlib.import_module("tasks.harness.records").table(layout)
    database = os.path.relpath(layout.tracking / "mlflow.db")
    uri = (
        params.load(commands.ROOT / "params.yaml").get("tracking", {}).get("uri")
        or f"sqlite:///{database}"
    )
    return "\n".join(
        [
            table.read_text().rstrip() + "\n" if table.exists() else "",
            *([f"{benchmarks}\n"] if benchmarks else []),
            f"report    {layout.report / 'index.html'}",
            f"MLflow    {uri if uri.startswith('http') else mlflow_place(uri)}",
        ]
    )


def mlflow_place(uri: str) -> str:
    return f"{pages_command()}    then http://127.0.0.1:5000 (it reads {uri})"


def pages_command() -> str:
    """The command that shows both records, as it is typed from here."""
    is_installed = os.path.exists(os.path.join(os.path.dirname(sys.executable), "winnow"))
    return f"{tool('winnow')} ui" if is_installed else f"{tool('python')} -m flows ui"


def prefect_place() -> str:
    """Where records of runs are: on the server that is named, else in the database under
    PREFECT_HOME."""
    if url := server.named_url():
        return url.rstrip("/").removesuffix("/api")
    moved = f"PREFECT_HOME={server.home()} " if "PREFECT_HOME" in os.environ else ""
    return (
        f"{moved}{pages_command()}    then http://127.0.0.1:4200 (it reads "
        f"{server.home()}/prefect.db)"
    )


def tool(name: str) -> str:
    """A command of this environment, as it is typed from here."""
    path = os.path.join(os.path.dirname(sys.executable), name)
    return min(path, os.path.relpath(path), key=len)
