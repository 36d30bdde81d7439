"""Load an export by the loader of its trainer, in an interpreter that has the trainer, and compare
what arrives with the visits: their number, their order and, where it is read, the group size."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.train.external.export import FILES, Options, segments, target_of, truth_of
from tasks.train.external.targets import Target
from tasks.train.external.visits import Visits


def require_loader(name: str) -> None:
    """Raise ParamsError for a target without a loader that can be run."""
    if not target_of(name).is_loadable:
        raise ParamsError(f"no loader of {name} can be run: leave --check out")


def check(
    visits: Visits, options: Options, manifest: dict[str, Any], out: Path, python: str
) -> Iterator[str]:
    """Yield a sentence for each file of an export that the trainer of `python` loads as it was
    written. Raise ArtifactError if `python` lacks the trainer, and if a file arrives otherwise."""
    name, target = options.target, target_of(options.target)
    paths = [out / one["file"] for one in manifest["segments"]]
    version, files = loaded(name, paths, python)
    for path, rows, segment in zip(paths, files, segments(visits, target), strict=True):
        wanted = expected(target, segment.table, options.is_plain)
        require_same(f"{path} arrives otherwise: {name} {version}", rows, wanted)
        kept = "order and group sizes" if any(size for _, size in wanted) else "order"
        yield f"{path}: {name} {version} loads {len(rows)} visits in the plan's {kept}"


def expected(target: Target, table: pl.DataFrame, is_plain: bool) -> list[list[Any]]:
    """Return what a loader must read: for each visit its ground truth, and its group size if the
    trainer has one for each prompt."""
    each = target.sizes == "prompt"
    return [
        [truth_of(visit, is_plain), (visit["group_size"] or None) if each else None]
        for visit in table.iter_rows(named=True)
    ]


def require_same(start: str, rows: list[list[Any]], planned: list[list[Any]]) -> None:
    """Raise ArtifactError, with a message that begins with `start`, if the rows differ."""
    if rows != planned:
        pairs = zip(rows, planned, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        raise ArtifactError(
            f"{start} loads {len(rows)} visits of {len(planned)}, and only the first {same} are "
            "the plan's"
        )


def loaded(name: str, paths: list[Path], python: str) -> tuple[str, list[list[Any]]]:
    """Return the version of the trainer in `python`, and what its loader reads of each file: a list
    [ground truth, group size or None] for each visit. Raise ArtifactError if it fails."""
    with tempfile.TemporaryDirectory() as cache:  # of `datasets`, which copies what it reads
        command = [python, str(FILES / "loaders.py.txt"), name, *map(str, paths)]
        environment = {**os.environ, "HF_DATASETS_CACHE": cache}
        try:
            run = subprocess.run(command, capture_output=True, text=True, env=environment)
        except OSError as error:
            raise ArtifactError(f"--check: {python} cannot be run: {error}") from error
    if run.returncode:
        last = (run.stderr.strip() or "no message").splitlines()[-1]
        raise ArtifactError(failure(name, python, last))
    found = json.loads(run.stdout.splitlines()[-1])
    return found["version"], found["files"]


def failure(name: str, python: str, last: str) -> str:
    """Return a message about a loader that failed; `last` is the last line that it printed."""
    if last.startswith("ModuleNotFoundError"):
        return (
            f"the export is written but not checked, because {name} cannot be imported in {python} "
            f"({last}): name an interpreter that has it with --check"
        )
    return f"the export is written, but the loader of {name} in {python} fails: {last}"
