"""What `winnow clean` can remove: see the table in docs/guide/operating.md.

DVC's own `dvc gc` is not used. It keeps only what the stages of the present dvc.yaml name, so it
would remove outputs that dvc.lock has of cells which the experiment leaves out, and outputs in git
that the run cache restores (dvc issue 4634). It knows no age, and leaves the run cache as it is."""

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from flows.pipeline import commands, lock, reasons, roots
from flows.pipeline.roots import Root
from flows.serve import server
from tasks.common import params
from tasks.common.files import ArtifactError, digest_file, read_json, write_json
from tasks.common.tracking import cleaning, journal, pipelines
from tasks.common.tracking.settings import Tracking

MD5 = re.compile(r"""md5['"]?: ['"]?([0-9a-f]{32}(\.dir)?)""")  # YAML, or the note of a push
CARDS = (  # of the policies whose rollouts stay; `rounds` is of versions before 0.2
    "policy.json",
    "runs/*/*/train/policy.json",
    "rounds/*/runs/*/*/train/policy.json",
)
PUSHED = "pushed"  # the folder of the notes of published policies, in a data root
OLD = """FROM flow_run WHERE end_time < :before
    AND flow_id IN (SELECT id FROM flow WHERE name IN (:flow, 'winnow'))"""  # its former name
IN_RUNS = [  # a run's tasks and states follow the run itself
    f"DELETE FROM {table} WHERE flow_run_id IN (SELECT id {OLD})"  # nosec B608  # of constants
    for table in ("artifact_collection", "artifact", "log")
]


@dataclass(frozen=True)
class Place:
    """What a place would lose: a number of `things`, of which `act` removes the rows of databases,
    and these files and folders."""

    name: str
    things: str
    num: int = 0
    paths: Sequence[Path] = ()
    act: Callable[[], object] = lambda: None

    @property
    def size(self) -> int:
        """Return the bytes of the files."""
        files = [file for path in self.paths for file in within(path) if file.is_file()]
        return sum(file.lstat().st_size for file in files)

    def remove(self) -> None:
        """Remove everything, and folders that this makes empty."""
        self.act()
        for path in self.paths:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()


def examine(before: float) -> Iterator[Place]:
    """Yield every place of the project. What was last written at the time `before`, in seconds, or
    later, stays. Raise LockError for an unreadable dvc.lock."""
    if broken := lock.broken(commands.ROOT):
        raise lock.LockError("\n".join(broken))
    every = roots.every()

    def paths(*patterns: str) -> list[Path]:
        return [path for root in every for one in patterns for path in root.layout.root.glob(one)]

    @cache
    def policies() -> set[str]:
        cards = map(read_json, paths(*CARDS))
        return {*(card["digest"] for card in cards), *(note["policy"] for note in pushed)}

    pushed = [read_json(path) for path in paths(f"{PUSHED}/*.json")]
    yield from caches(before, str(pushed))
    for root in every:
        yield records(root, before, policies)
    yield prefect(before)
    runs = paths("checkpoints/*", "checkpoints/finished/*/*")
    yield of_paths("checkpoints", "trainings", [p for p in runs if p.name != "finished"], before)
    unused = [path for path in paths("store/*") if path.name not in policies()]
    yield of_paths("store", "policies", unused, before)
    yield of_paths("logs", "folders", paths("logs/*"), before)


def of_paths(name: str, things: str, unused: Iterable[Path], before: float) -> Place:
    """Return a place that loses those of the files and folders `unused` that are old."""
    old = [path for path in unused if all(one.lstat().st_mtime < before for one in within(path))]
    return Place(name, things, len(old), old)


def within(path: Path) -> list[Path]:
    """Return the files in a folder; or the path itself, for a file or an empty folder."""
    return [one for one in path.rglob("*") if not one.is_dir()] or [path]


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

    commits = dict.fromkeys(git("show-ref", "--head", "--hash").split())
    files = ("dvc.lock", "*/dvc.lock", "*.dvc")
    return git("grep", "-hoE", MD5.pattern, *commits, "--", *files) if commits else ""


def records(root: Root, before: float, policies: Callable[[], set[str]]) -> Place:
    """Return MLflow's record of a data root."""
    settings = params.section(params.load(root.params), "tracking", Tracking)
    database = root.layout.tracking / "mlflow.db"
    if settings.uri or not database.is_file():
        return Place("tracking", "runs" + ": tracking.uri names another place" * bool(settings.uri))
    current = {
        (journal.key_of(root.layout.root, path), digest_file(path))
        for stage in lock.read(root.lock)
        for path in pipelines.outputs(root.layout, *params.coordinates(stage))
    }
    uri = f"sqlite:///{database}"
    runs, folders, collect = cleaning.unreferenced(uri, before, current, policies())
    return Place(
        "tracking", "runs", len(runs), folders, lambda: (collect(), in_database(database, "VACUUM"))
    )


def prefect(before: float) -> Place:
    """Return the ended runs of the project in Prefect's database, which a user's projects share.
    Prefect's own vacuum would remove those of all flows."""
    database, url = server.home() / "prefect.db", server.named_url()
    if url or not database.is_file():
        return Place("prefect", "flow runs" + ": PREFECT_API_URL names a server" * bool(url))
    until = datetime.fromtimestamp(before, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    execute = partial(in_database, database, before=until, flow=commands.NAME)
    (num,) = execute(f"SELECT count(*) {OLD}")
    return Place(
        "prefect", "flow runs", num, act=lambda: execute(*IN_RUNS, f"DELETE {OLD}", "VACUUM")
    )


def in_database(path: Path, *statements: str, **values: str) -> Any:
    """Execute statements in a database file, and return the first row of the last one's result.
    Raise ArtifactError if the file is locked or damaged."""
    try:
        with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
            database.execute("PRAGMA foreign_keys = ON")
            return [database.execute(one, values).fetchone() for one in statements][-1]
    except sqlite3.DatabaseError as error:
        raise ArtifactError(f"{path}: {error}: stop the servers that use it (winnow ui)") from error


def note_pushed(root: Root, recipe: str, seed: int) -> None:
    """Note that the policy of a cell is published, so that what made it stays."""
    entries = lock.read(root.lock)
    stages = [entries.get(f"{name}@{recipe}-{seed}") for name in ("allocate", "train", "evaluate")]
    policy = read_json(root.layout.trained_card(recipe, seed))["digest"]
    note = {"policy": policy, "stages": stages}
    write_json(root.layout.root / PUSHED / f"{recipe}-{seed}-{policy}.json", note)
