"""The user's own task files, and a digest of everything that they read.

lm-evaluation-harness lets a task file run Python: `!function` imports a module beside it, an
unknown metric is loaded from a folder or a hub, and a pickled table runs code when it is read. So
the user has to declare the files trusted."""

import glob
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tasks.common.config import yaml_tags
from tasks.common.files import ArtifactError, digest, digest_file

LOADERS = ("arrow", "csv", "json", "parquet", "text")  # of `datasets`, for local files


def task_files(folder: Path, installed: Path | None = None) -> list[Path]:
    """Return the YAML files below `folder` and their includes, except files below `installed`,
    which come with the harness. Raise ArtifactError if there are none, or an include is missing."""
    if not folder.is_dir():
        raise ArtifactError(f"--include-path {folder} is not a folder")
    waiting = sorted(folder.glob("**/*.yaml"))
    if not waiting:
        raise ArtifactError(f"--include-path {folder} has no task file: their names end in .yaml")
    found: dict[Path, None] = {}
    while waiting:
        path = waiting.pop(0).resolve()
        if path in found or (installed and path.is_relative_to(installed)):
            continue
        if not path.is_file():
            raise ArtifactError(f"{path} does not exist, and a task file includes it")
        found[path] = None
        waiting += [path.parent / other for other in named(yaml_tags.read(path), "include")]
    return list(found)


def named(value: Any, key: str, is_below: bool = False) -> Iterator[str]:
    """Yield the texts under every `key` in nested mappings and lists; all texts if `is_below`."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from named(part, key, is_below or name == key)
    elif isinstance(value, list):
        for part in value:
            yield from named(part, key, is_below)
    elif is_below and isinstance(value, str):
        yield value


def fingerprint(paths: Collection[Path]) -> str:
    """Return a digest of task files, of the Python in their folders and of the tables that they
    name, which determine the results. Raise ArtifactError for a missing table."""
    modules = [f"{glob.escape(str(path.parent))}/**/*.py" for path in paths]
    code = {Path(name) for each in modules for name in glob.glob(each, recursive=True)}
    tables = {Path(table) for path in paths for table in data_files(path)}
    return digest(sorted([str(p), digest_file(p)] for p in {*paths, *code, *tables}))


def data_files(path: Path) -> Iterator[str]:
    """Yield the local data files of a task file: those that match its patterns, or all files of its
    folder. Raise ArtifactError if a pattern matches none."""
    settings = yaml_tags.read(path)
    source, part = (next(named(settings, key), "") for key in ("dataset_path", "data_dir"))
    is_local = os.path.isdir(source) or source in LOADERS
    folder = os.path.join(source * os.path.isdir(source), part * is_local)
    every = ["**"] if os.path.isdir(folder) else []
    for pattern in [*named(settings, "data_files")] or every:
        if "://" in pattern:
            continue
        found = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
        if not found:
            raise ArtifactError(
                f"{path}: {pattern} does not exist; use an absolute path, or one relative to "
                f"{folder or 'the project'}"
            )
        yield from (name for name in found if Path(name).is_file())
