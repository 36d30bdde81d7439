"""What `winnow clean` can remove: see the table in docs/guide/operating.md.

DVC's own `dvc gc` is not used. It keeps only what the stages of the present dvc.yaml name, so it
would remove outputs that dvc.lock has of cells which the experiment leaves out, and outputs in git
that the run cache restores (dvc issue 4634). It knows no age, and leaves the run cache as it is."""

import importlib
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.pipeline import commands, lock, reasons, roots
from flows.pipeline.roots import Root
from flows.serve import server
from tasks.common import params
from tasks.common.files import ArtifactError, digest_file, read_json, write_json
from tasks.common.tracking import journal, pipelines
from tasks.common.tracking.settings import Tracking

MD5 = re.compile(r"""md5['"]?: ['"]?([0-9a-f]{32}(\.dir)?)""")  # YAML, or the note of a push
PUSHED = "pushed"  # the folder of the notes of published policies, in a data root
OLD = """FROM flow_run WHERE end_time < ?
    AND flow_id IN (SELECT id FROM flow WHERE name = 'winnow')"""
IN_PREFECT = {"artifact_collection": "flow_run_id", "artifact": "flow_run_id"}
IN_PREFECT |= {"log": "flow_run_id", "flow_run": "id"}  # and a run's tasks and states follow it


@dataclass(frozen=True)
class Place:
    """What a place would lose: a number of `things`, and bytes in files."""

    name: str
    things: str
    num: int = 0
    size: int = 0
    remove: Callable[[], object] = lambda: None


def examine(before: float) -> Iterator[Place]:
    """Yield every place of the project. What was last written at the time `before`, in seconds, or
    later, stays. Raise LockError for an unreadable dvc.lock."""
    if broken := lock.broken(commands.ROOT):
        raise lock.LockError("\n".join(broken))
    every = roots.every()
    layouts = [root.layout for root in every]
    pushed = [read_json(path) for one in layouts for path in one.root.glob(f"{PUSHED}/*.json")]
    yield from caches(before, str(pushed))
    for first in dict.fromkeys(root.first for root in every):
        yield records([root for root in every if root.first == first], before, pushed)
    yield prefect(before)
    runs = [path for one in layouts for path in one.checkpoints.glob("*")]
    runs += [path for one in layouts for path in one.checkpoints.glob("finished/*/*")]
    yield of_paths("checkpoints", "trainings", [p for p in runs if p.name != "finished"], before)
    stored = [path for one in layouts for path in one.store.glob("*")]
    policies = policies_of(every, pushed) if stored else set()
    unused = [path for path in stored if path.name not in policies]
    yield of_paths("store", "policies", unused, before)
    logs = [path for one in layouts for path in one.root.glob("logs/*")]
    yield of_paths("logs", "folders", logs, before)


def of_paths(name: str, things: str, unused: Iterable[Path], before: float) -> Place:
    """Return a place that loses those of the files and folders `unused` that are old."""
    old = [path for path in unused if all(one.lstat().st_mtime < before for one in within(path))]
    return Place(name, things, len(old), sum(map(size_of, old)), lambda: remove(old))


def within(path: Path) -> list[Path]:
    """Return the files in a folder; or the path itself, for a file or an empty folder."""
    return [one for one in path.rglob("*") if not one.is_dir()] or [path]


def size_of(path: Path) -> int:
    return sum(one.lstat().st_size for one in within(path) if one.exists() and not one.is_dir())


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders that exist, and folders that this makes empty."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()


def policies_of(every: Iterable[Root], pushed: list[dict[str, Any]]) -> set[str]:
    """Return the digests of the present policies of data roots, and of the pushed ones."""
    kinds = ("policy.json", "runs/*/*/train/policy.json")
    cards = [path for root in every for kind in kinds for path in root.layout.root.glob(kind)]
    return {*(read_json(card)["digest"] for card in cards), *(note["policy"] for note in pushed)}


def caches(before: float, pushed: str) -> Iterator[Place]:
    """Yield DVC's run cache and cache. Objects stay if a dvc.lock or *.dvc of the working tree, of
    HEAD or of a branch, tag or experiment names them, or a pushed policy, or a young entry of the
    run cache."""
    folder = reasons.cache_folder(commands.ROOT)
    if not folder.resolve().is_relative_to(commands.ROOT.resolve()):
        yield Place("cache", f"objects: {folder}, outside the project, is left alone")
        return
    files = [path for kind in ("dvc.lock", "*.dvc") for path in commands.ROOT.rglob(kind)]
    named = md5s_in(pushed, in_git(), *(path.read_text() for path in files if path.is_file()))
    entries = {p: md5s_in(p.read_text()) for p in folder.glob("runs/*/*/*") if p.is_file()}
    unused = [path for path, md5s in entries.items() if not md5s <= named]
    yield of_paths("run cache", "entries", unused, before)
    named = named.union(*(entries[p] for p in entries if p.lstat().st_mtime >= before))
    objects = {p.parent.name + p.name: p for p in folder.glob("files/md5/??/*")}
    for name in [name for name in named if name.endswith(".dir") and name in objects]:
        named |= {entry["md5"] for entry in read_json(objects[name])}
    unused = [path for name, path in objects.items() if name not in named]
    yield of_paths("cache", "objects", unused, before)


def md5s_in(*texts: str) -> set[str]:
    return {match[1] for text in texts for match in MD5.finditer(text)}


def in_git() -> str:
    """Return the lines with digests in the dvc.lock and *.dvc files of HEAD and of all refs; empty
    outside of git. Raise ArtifactError if git fails."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True)
        if done.returncode > 1 and "not a git repository" not in done.stderr:
            raise ArtifactError(f"git {arguments[0]} failed: {done.stderr.strip()}")
        return done.stdout

    refs = git("for-each-ref", "--format=%(objectname)")
    names = dict.fromkeys((refs + git("rev-parse", "-q", "--verify", "HEAD")).split())
    files = ("dvc.lock", "*/dvc.lock", "*.dvc")
    return git("grep", "-hoE", MD5.pattern, *names, "--", *files) if names else ""


def records(chain: list[Root], before: float, pushed: list[dict[str, Any]]) -> Place:
    """Return MLflow's record of a data root and its later rounds."""
    settings = params.section(params.load(chain[0].params), "tracking", Tracking)
    database = chain[0].layout.tracking / "mlflow.db"
    if settings.uri or not database.is_file():
        return Place("tracking", "runs" + ": tracking.uri names another place" * bool(settings.uri))
    current = {
        (journal.key_of(root.layout.root, path), digest_file(path))
        for root in chain
        for stage in lock.read(root.lock)
        for path in pipelines.outputs(root.layout, *params.coordinates(stage))
    }
    runs, folders, collect = importlib.import_module("tasks.common.tracking.cleaning").unreferenced(
        f"sqlite:///{database}", before, current, policies_of(chain, pushed)
    )

    def act() -> None:
        collect()
        remove(folders)
        in_database(database, "VACUUM")

    return Place("tracking", "runs", len(runs), sum(map(size_of, folders)), act)


def prefect(before: float) -> Place:
    """Return the ended runs of this flow in Prefect's database, which all projects of a user share.
    Prefect's own vacuum would remove those of all flows."""
    database, url = server.home() / "prefect.db", server.named_url()
    if url or not database.is_file():
        return Place("prefect", "flow runs" + ": PREFECT_API_URL names a server" * bool(url))
    until = datetime.fromtimestamp(before, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")

    def act() -> None:
        for table, column in IN_PREFECT.items():
            rows = f"{table} WHERE {column} IN (SELECT id {OLD})"
            in_database(database, f"DELETE FROM {rows}", until)  # nosec B608  # of constants
        in_database(database, "VACUUM")

    return Place(
        "prefect", "flow runs", in_database(database, f"SELECT count(*) {OLD}", until)[0], 0, act
    )


def in_database(path: Path, statement: str, *values: str) -> Any:
    """Execute a statement in a database file, and return the first row of its result. Raise
    ArtifactError if the file is locked or damaged."""
    try:
        with closing(sqlite3.connect(path, timeout=60)) as database, database:
            database.execute("PRAGMA foreign_keys = ON")
            return database.execute(statement, values).fetchone()
    except sqlite3.DatabaseError as error:
        raise ArtifactError(f"{path}: {error}: stop the servers that use it (winnow ui)") from error


def note_pushed(root: Root, recipe: str, seed: int) -> None:
    """Note that the policy of a cell is published, so that what made it stays."""
    entries = lock.read(root.lock)
    stages = [entries.get(f"{name}@{recipe}-{seed}") for name in ("allocate", "train", "evaluate")]
    policy = read_json(root.layout.trained_card(recipe, seed))["digest"]
    note = {"policy": policy, "stages": stages}
    write_json(root.layout.root / PUSHED / f"{recipe}-{seed}-{policy}.json", note)
