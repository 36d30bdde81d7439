"""The user's own task files: the code that they could run, and a digest of all that they read.

lm-evaluation-harness lets a task file run Python: `!function` imports a module beside it, an
unknown metric is loaded from a folder or a hub, and a pickled table runs code when it is read. All
of these are refused unless the user declares the file as trusted. Templates of prompts are rendered
in jinja2's sandbox (see `run`)."""

import glob
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tasks.common.config.yaml_entries import Entry, entries
from tasks.common.files import ArtifactError, digest, digest_file

FORMATS = ("json", "csv", "parquet", "arrow", "text")
HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
TRUST = "--trust-tasks runs it"


def task_files(folder: Path, trusted: Path | None = None) -> list[Path]:
    """Return the YAML files below `folder` and their includes, except files below `trusted`, which
    come with the harness. Raise ArtifactError if there are none."""
    if not folder.is_dir():
        raise ArtifactError(f"--include-path {folder} is not a folder")
    waiting = sorted(folder.glob("**/*.yaml"))
    if not waiting:
        raise ArtifactError(f"--include-path {folder} has no task file: their names end in .yaml")
    found: dict[Path, None] = {}
    while waiting:
        path = waiting.pop(0).resolve()
        if path in found or (trusted and path.is_relative_to(trusted)):
            continue
        if not path.is_file():
            raise ArtifactError(f"{path} does not exist, and a task file includes it")
        found[path] = None
        waiting += [path.parent / e.text for e in entries(path) if e.keys[-1:] == ("include",)]
    return list(found)


def check(paths: Collection[Path], metrics: Collection[str]) -> None:
    """Raise ArtifactError with every line that could run code; `metrics` are the harness's own."""
    found = [
        f"{path} line {entry.line}: {problem}"
        for path in paths
        for entry in entries(path)
        if (problem := runs_code(entry, path.parent, metrics))
    ]
    if found:
        raise ArtifactError("\n".join(["refused, because a task file could run code:", *found]))


def runs_code(entry: Entry, folder: Path, metrics: Collection[str]) -> str | None:
    """Return how an entry could run code, and the remedy, or None if it could not."""
    key = entry.keys[-1] if entry.keys else ""
    if entry.tag:
        return f"{entry.tag} {entry.text}".rstrip() + f" is Python; {TRUST}"
    if key == "trust_remote_code" and is_true(entry):
        return f"{key} runs what a hub has; take it out"
    if key == "hf_evaluate" and is_true(entry):
        return f"a metric of the library `evaluate` is a script; {TRUST}"
    if key == "metric" and entry.text not in metrics:
        return f"the harness has no metric {entry.text!r} and would load a script; {TRUST}"
    if key == "dataset_path" and not is_data(entry.text, folder):
        return (
            f"dataset_path is {entry.text!r}; give one of {', '.join(FORMATS)} with the files "
            f"under dataset_kwargs.data_files, or ORG/NAME of a hub; {TRUST}"
        )
    return None


def is_true(entry: Entry) -> bool:
    return entry.text.lower() not in ("false", "no", "off", "null", "")


def is_data(source: str, folder: Path) -> bool:
    """Return whether a data set is read as data: tables of supported formats, or a hub's data set,
    since the library `datasets` no longer runs scripts."""
    is_place = Path(source).exists() or (folder / source).exists()
    return source in FORMATS or (HUB.fullmatch(source) is not None and not is_place)


def fingerprint(paths: Collection[Path]) -> str:
    """Return a digest of task files, of the Python beside them and of the tables that they name,
    which determine the results. Raise ArtifactError for a missing table."""
    beside = {other for path in paths for other in path.parent.glob("*.py")}
    tables = {Path(table) for path in paths for table in data_files(path)}
    return digest(sorted([str(p), digest_file(p)] for p in {*paths, *beside, *tables}))


def data_files(path: Path) -> Iterator[str]:
    """Yield the files on this machine that a task file names as its data."""
    for entry in entries(path):
        if "data_files" not in entry.keys or "://" in entry.text:
            continue
        found = glob.glob(entry.text, recursive=True)
        if not found:
            raise ArtifactError(
                f"{path} line {entry.line}: {entry.text} does not exist; give a whole path, or one "
                "from the project's folder"
            )
        yield from (name for name in found if Path(name).is_file())
