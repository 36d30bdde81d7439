"""Conditions of a world after an event and the success of its command."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.files import read_json
from tasks.common.locations import open_location
from tasks.store.admin import maintenance
from tasks.store.folder import RolloutStore
from tests.bench.chaos.events import WHOLE, Event
from tests.bench.chaos.world import DONE, STAGES, World, differing, direct, repro

KNOWN = {
    "dvc's files": "temporary files of killed dvc processes, which DVC does not read",
    "dvc's lock": "what a killed dvc left in .dvc/tmp/rwlock: the error names the file to remove",
    "dvc's errors": "a file that a killed dvc left half written: the docs say what to do, dvc not",
    "late record": "what waited for room: the next stage sends it, and plain dvc has none to run",
    "dvc's words": "a full disk that dvc takes for a lock of another dvc, as the docs say",
}
"""Failures that the docs describe and that lose nothing: they are counted, and fail no run."""

MEASURES = ("report",)  # stages with the measured seconds of others in their outputs
KEY = ["prompt_digest", "sample_index"]


def following(world: World, event: Event) -> list[str]:
    """Return the stages that the event's command brings up to date."""
    names = world.stages
    if event.kind in WHOLE:
        return names
    return names[names.index(event.stage) :] if event.via == "flow" else [event.stage]


def failures(world: World, event: Event) -> Iterator[tuple[str, str]]:
    """Yield every check that fails, with details."""
    yield from wrong_outputs(world, event)
    yield from wrong_rows(world, event)
    yield from left_files(world)
    if event.via != "direct":
        yield from not_finished(world, event)
    if event.via == "dvc" and event.kind.startswith("full") and (names := pending(world)):
        world.run(direct(event.stage, world.project), forked=True)
        yield "late record", f"{names} waited for another stage"
    yield from wrong_record(world, event)
    yield from wrong_prefect(world)
    if left := [process.pid for process in world.processes()]:
        yield "processes", f"still running: {left}"


def wrong_outputs(world: World, event: Event) -> Iterator[tuple[str, str]]:
    """Yield outputs that differ from an undisturbed run in any bit."""
    ran, names = following(world, event), world.stages
    for stage in names[: names.index(ran[-1]) + 1]:
        if stage in MEASURES and (event.via == "flow" or event.kind in WHOLE):
            continue  # it contains training seconds, and when stages ran
        if wrong := differing(world.project, world.facts["outputs"][stage]):
            yield "outputs", f"{stage}: {', '.join(wrong)}"


def wrong_rows(world: World, event: Event) -> Iterator[tuple[str, str]]:
    """Yield rows of the store that are lost, changed or duplicated."""
    last = following(world, event)[-1]
    names = [*world.stages, DONE]
    before, wanted = (stored(world, name) for name in (event.stage, names[names.index(last) + 1]))
    if world.store:  # a separate store for this event
        wanted = wanted.join(before, on=["folder", *KEY], how="anti")
    location = world.store or str(world.data / "store")
    found = rows(location)
    if twice := len(found) - found.select("folder", *KEY).n_unique():
        yield "store", f"{twice} rows are stored twice"
    damaged = sum(store.num_damaged() for store in stores(location))
    if damaged and event.kind != "flip":
        yield "store", f"{damaged} shards are set aside"
    joined = found.join(wanted, on=["folder", *KEY], suffix="_wanted")
    if other := len(joined.filter(pl.col("token_ids") != pl.col("token_ids_wanted"))):
        yield "store", f"{other} rows are not what an undisturbed run samples"
    lost = len(wanted.join(found, on=["folder", *KEY], how="anti"))
    if lost and event.kind != "flip":  # lost rows are sampled again when needed
        yield "store", f"{lost} rows are lost"


def stores(location: str) -> list[RolloutStore]:
    return list(maintenance.folders(*open_location(location)))


def rows(location: str) -> pl.DataFrame:
    """Return all rows of a store, with their folder."""
    tables = []
    for store in stores(location):
        folder = "/".join(store.folder.split("/")[-2:])
        for span in store.spans():
            part = store.load(span, [*KEY, "token_ids"])
            if part is not None:
                tables.append(part.with_columns(folder=pl.lit(folder)))
    empty = STORE.frame([]).select(*KEY, "token_ids").with_columns(folder=pl.lit(""))
    return pl.concat([empty.clear(), *tables])


def stored(world: World, name: str) -> pl.DataFrame:
    """Return the rows of an undisturbed world at a snapshot."""
    return rows(str(world.folder / "snapshots" / name / "data" / "store"))


def wrong_record(world: World, event: Event) -> Iterator[tuple[str, str]]:
    """Yield runs in MLflow that stay RUNNING, and stages that one process recorded twice or
    never."""
    path = world.data / "tracking" / "mlflow.db"
    wanted = [name for name in following(world, event) if name != "code"]
    if not path.exists():
        if wanted:
            yield "mlflow", "there is no record"
        return
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        running = database.execute("select name from runs where status = 'RUNNING'").fetchall()
        twice = database.execute(
            "select value, count(*) from tags where key = 'record' group by value "
            "having count(*) > 1"
        ).fetchall()
        finished = database.execute("select name from runs where status = 'FINISHED'").fetchall()
    recorded = {str(name).partition(" ")[0] for (name,) in finished}
    if missing := set(wanted) - recorded:
        yield "mlflow", f"not recorded: {', '.join(sorted(missing))}"
    if running:
        yield "mlflow", f"RUNNING: {[name for (name,) in running]}"
    if twice:
        yield "mlflow", f"recorded twice: {twice}"
    if names := pending(world):
        yield "mlflow", f"never sent: {names}"


def pending(world: World) -> list[str]:
    """Return the records of stages that are not in MLflow yet."""
    return [path.name for path in (world.data / "tracking" / "pending").glob("*.jsonl")]


def wrong_prefect(world: World) -> Iterator[tuple[str, str]]:
    path = world.folder / "home" / "prefect" / "prefect.db"
    if not path.exists():
        return
    with closing(sqlite3.connect(path)) as database:
        for table in ("flow_run", "task_run"):
            # Prefect gives `NotReady` to a task after a failed upstream task
            running = (
                f"select count(*) from {table} where state_type in ('RUNNING', 'PENDING') "
                "and state_name != 'NotReady'"
            )
            ((number,),) = database.execute(running).fetchall()
            if number:
                yield "prefect", f"{number} rows of {table} are RUNNING or PENDING"


def left_files(world: World) -> Iterator[tuple[str, str]]:
    """Yield half-written files, checkpoints of finished runs, and dvc's locks with dead holders."""
    hidden = [
        path.relative_to(world.project).as_posix()
        for path in world.data.rglob(".*")
        if path.is_file() and path.name != ".gitignore"
    ]
    if ours := [name for name in hidden if not name.endswith(".tmp")]:
        yield "temporary files", ", ".join(sorted(ours)[:5])
    theirs = [name for name in hidden if name.endswith(".tmp")]
    theirs += [path.name for path in world.project.glob(".*.tmp")]
    theirs += [path.name for path in (world.project / ".dvc" / "cache").rglob("*.tmp")]
    if theirs:
        yield "dvc's files", ", ".join(sorted(theirs)[:5])
    rwlock = world.project / ".dvc" / "tmp" / "rwlock"
    held: dict[str, Any] = read_json(rwlock) if rwlock.exists() and rwlock.stat().st_size else {}
    if any(held.values()):
        yield "dvc's lock", str(held)[:300]


def not_finished(world: World, event: Event) -> Iterator[tuple[str, str]]:
    """Check that a second run finds nothing to do."""
    if event.via == "flow" or event.kind in WHOLE:
        code, said = world.run(
            ["dvc", "status", "--json", *map(STAGES.__getitem__, world.stages)], forked=True
        )
        if code or said.strip().splitlines()[-1:] != ["{}"]:
            yield "status", said[-500:]
    else:
        code, said = world.run(repro(event.stage), forked=True)
        if code or ("didn't change, skipping" not in said and "are up to date" not in said):
            yield "second run", said[-500:]
