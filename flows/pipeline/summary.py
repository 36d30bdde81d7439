"""A flow run's record in MLflow, and its last lines on the terminal."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager

from flows.pipeline import commands
from flows.pipeline.roots import Root
from flows.pipeline.stages import Stages
from flows.serve import server
from tasks.common import params
from tasks.common.accounting.success import without_success
from tasks.common.checksums import read_note
from tasks.common.redaction import without_secrets


@contextmanager
def recorded(stages: Stages) -> Iterator[None]:
    """Record the block's stages in one MLflow run, with links to the runs of cached stages."""
    from tasks.common import tracking  # a run with nothing to do does not need it

    os.environ[tracking.PIPELINE_VARIABLE] = identity = tracking.start_pipeline()
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
        outcomes = stages.outcomes.items()
        cached = [params.coordinates(stage) for stage, outcome in outcomes if outcome == "Cached"]
        if {"Ran", "Failed"} & set(stages.outcomes.values()):  # else there is no run to close
            with chdir(commands.ROOT):  # tracking.uri may be relative to it
                tracking.end_pipeline(settings, stages.root.layout, identity, status, cached)


def conclusion(stages: Stages) -> str:
    number, outcomes = len(stages.ordered), list(stages.outcomes.values())
    if stages.idle:
        return f"nothing to do: all {number} stages are up to date"
    counts = [(name, outcomes.count(name)) for name in ("Ran", "Restored", "Cached", "Failed")]
    not_run = number - len(outcomes)
    words = [f"{count} {name.lower()}" for name, count in [*counts, ("not run", not_run)] if count]
    return f"{number} stages: {', '.join(words)}{success_words(stages)}"


def success_words(stages: Stages) -> str:
    """Return a line if the profile of these stages has no success, else an empty string."""
    found = read_note(stages.root.layout.profile / "summary.json")
    has_ended = stages.outcomes.get("profile", "Failed") != "Failed"
    words = without_success(found.get("outcomes", {})) if has_ended else ""
    return f"\n{words}" if words else ""


def left_out(stages: Stages) -> str:
    """Return a line with the stages left out, and why the report is, if cells are evaluated."""
    names = ", ".join(map(stages.root.titled, stages.left_out))
    cells = [stage for stage in stages.ordered if stage.startswith("evaluate@")]
    waits = cells and "report" in stages.left_out
    return f"left out: {names}" + " (the report waits for all cells)" * bool(waits)


def places(root: Root, *, is_stale: bool = False) -> str:
    """Return as text the leaderboard, and where the report and MLflow are. If the
    report is stale, the first line says so."""
    layout = root.layout
    table = layout.report / "leaderboard.txt"
    database = os.path.relpath(layout.tracking / "mlflow.db")
    uri = (params.load(root.params).get("tracking") or {}).get("uri") or f"sqlite:///{database}"
    pages = f"{own_command()} ui    then http://127.0.0.1:5000 (it reads {uri})"
    if not root.is_main:  # which `winnow ui` does not read
        pages = f"{own_command('mlflow')} ui --backend-store-uri {uri}"
    stale = "stale: this leaderboard is of an earlier run; a new one needs all cells\n"
    return "\n".join(
        [
            *([stale] if is_stale and table.exists() else []),
            table.read_text().rstrip() + "\n" if table.exists() else "",
            f"report    {layout.report / 'index.html'}",
            f"MLflow    {uri if uri.startswith('http') else pages}",
        ]
    )


def failed(message: str) -> str:
    """Return the failure, in red on a terminal, and the command to try again."""
    is_plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ
    shown = message if is_plain else f"\033[31m{message}\033[0m"
    return f"{shown}\nto try again: {same_command()}"


def same_command() -> str:
    """Return the command line of this process, quoted for a shell, without secrets."""
    return without_secrets(" ".join([own_command(), *map(shlex.quote, sys.argv[1:])]))


def page_of(url: str) -> str:
    """Return the address of a server's pages, without secrets. `url` is the address of its API."""
    return without_secrets(url).rstrip("/").removesuffix("/api")


def prefect_place() -> str:
    """Return where Prefect's run records are: the server at PREFECT_API_URL, or the command that
    shows the database under PREFECT_HOME."""
    if url := server.named_url():
        return page_of(url)
    moved = f"PREFECT_HOME={server.home()} " if "PREFECT_HOME" in os.environ else ""
    database = f"{server.home()}/prefect.db"
    return f"{moved}{own_command()} ui    then http://127.0.0.1:4200 (it reads {database})"


def own_command(name: str = "winnow") -> str:
    """Return the path of this environment's command for a shell, relative if that is shorter."""
    path = os.path.join(os.path.dirname(sys.executable), name)
    return shlex.quote(min(path, os.path.relpath(path), key=len))
