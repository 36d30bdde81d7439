"""What a flow run leaves behind for people: its run in MLflow, and the last lines on the
terminal."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flows import server
from flows.roots import Root
from flows.stages import Stages
from tasks.common import params
from tasks.common.redaction import without_secrets


@contextmanager
def recorded(stages: Stages) -> Iterator[None]:
    """One parent run in MLflow for the stages that run meanwhile, linked to what was cached."""
    from tasks.common import tracking  # a run that has nothing to do needs none of it

    layout = stages.root.layout
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
        settings = params.section(params.load(stages.root.params), "tracking", tracking.Tracking)
        cached = [
            params.coordinates(stage)
            for stage, outcome in stages.outcomes.items()
            if outcome == "Cached"
        ]
        tracking.end_pipeline(settings, layout, identity, status, cached)


def conclusion(looked_at: Sequence[Stages]) -> str:
    """What happened in all roots, in one sentence."""
    number = sum(len(stages.ordered) for stages in looked_at)
    of = f" of {len(looked_at)} rounds" if len(looked_at) > 1 else ""
    if all(stages.idle for stages in looked_at):
        return f"nothing to do: all {number} stages{of} are up to date"
    outcomes = [outcome for stages in looked_at for outcome in stages.outcomes.values()]
    counts = [(name, outcomes.count(name)) for name in ("Ran", "Restored", "Cached", "Failed")]
    not_run = number - len(outcomes)
    words = [f"{count} {name.lower()}" for name, count in [*counts, ("not run", not_run)] if count]
    return f"{number} stages{of}: {', '.join(words)}"


def left_out(stages: Stages) -> str:
    """What a restriction to some cells did not look at, and why the report is among it."""
    names = ", ".join(map(stages.root.titled, stages.left_out))
    return f"left out: {names}" + (
        " (the report waits for all cells)" if "report" in stages.left_out else ""
    )


def places(root: Root) -> str:
    """The result, and where more is to be seen."""
    layout = root.layout
    table = layout.report / "leaderboard.txt"
    benchmarks = importlib.import_module("tasks.harness.records").table(layout)
    database = os.path.relpath(layout.tracking / "mlflow.db")
    uri = params.load(root.params).get("tracking", {}).get("uri") or f"sqlite:///{database}"
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
        return without_secrets(url).rstrip("/").removesuffix("/api")
    moved = f"PREFECT_HOME={server.home()} " if "PREFECT_HOME" in os.environ else ""
    return (
        f"{moved}{pages_command()}    then http://127.0.0.1:4200 (it reads "
        f"{server.home()}/prefect.db)"
    )


def tool(name: str) -> str:
    """A command of this environment, as it is typed from here."""
    path = os.path.join(os.path.dirname(sys.executable), name)
    return min(path, os.path.relpath(path), key=len)
