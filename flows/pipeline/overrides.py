"""Values of params.yaml for one run: `train.learning_rate=1e-4`, in the syntax of `dvc exp run -S`.

The file contains the values during the run, for DVC and the stages, and dvc.lock records them with
the results. The file is then restored; after a kill, the next run restores it from a copy."""

import importlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.common.checksums import read_checked, write_checked
from tasks.common.config.editing import overridden
from tasks.common.files import ArtifactError, digest, write_text
from tasks.common.layout import Layout
from tasks.common.params import CELL_NAME, ParamsError, load, parsed
from tasks.common.redaction import without_secrets

logger = logging.getLogger(__name__)

NUMBER = r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
SECTIONS = (  # sections settable through the API; not engine, policy, store, tracking, verify
    *("experiment", "gates", "profile", "sampling", "allocate", "train", "learner", "guards"),
    *("checkpoint", "evaluate", "report", "recipes"),
)
THROUGH_API = re.compile(
    rf"({'|'.join(SECTIONS)})(\.[\w-]+)+={NUMBER}"
    rf"|experiment\.recipes=\[{CELL_NAME.pattern}(, ?{CELL_NAME.pattern})*\]"
    r"|experiment\.seeds=\[\d+(, ?\d+)*\]",
    re.ASCII,
)


def check_remote(overrides: list[str]) -> None:
    """Raise ParamsError for an override that must not come through Prefect's API, which other users
    may reach. Only numbers, recipes and seeds are allowed: they cannot name a file or a server."""
    for override in overrides:
        if not THROUGH_API.fullmatch(override):
            key = override.partition("=")[0]
            raise ParamsError(
                f"{key} cannot be set through Prefect's API, which accepts numbers of "
                f"{', '.join(SECTIONS)}, and experiment.recipes=[NAME,...] and "
                "experiment.seeds=[0,...]: set it in params.yaml"
            )


@contextmanager
def applied(path: Path, layout: Layout, overrides: list[str]) -> Iterator[None]:
    """Undo a killed run's overrides. Apply `overrides` to the file at `path` until the block ends.
    The caller must hold the pipeline's lock. Raise ParamsError for a key that no stage reads."""
    note = note_of(layout)
    put_back(path, note)
    if not overrides:
        yield
        return
    before = path.read_bytes().decode()  # keeps the line endings
    during, values = overridden(path.read_text(), path.name, overrides)
    importlib.import_module("tasks.code.effective").complete(values)  # refuses unknown keys
    write_checked(note, {"before": before, "during": digest(during)})
    write_text(path, during)
    try:
        yield
    finally:
        put_back(path, note)
    logger.warning(
        "%s is restored; the outputs in %s were made with %s",
        path.name,
        os.path.relpath(layout.root),
        without_secrets(", ".join(overrides)),
    )


def values_of(path: Path, note: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the values of the file at `path` with `overrides`, but without those of the run that
    wrote `note`, if it still runs or was killed. Raise ParamsError as `applied` does."""
    load(path)  # refuses a missing or invalid file
    text = path.read_text()
    with suppress(ArtifactError):  # there is none, or it is damaged
        left = read_checked(note)
        text = left["before"] if digest(text) == left["during"] else text
    if not overrides:
        return dict(parsed(text))
    values = overridden(text, path.name, overrides)[1]
    importlib.import_module("tasks.code.effective").complete(values)  # refuses unknown keys
    return values


def note_of(layout: Layout) -> Path:
    """Return the path of the note, a copy of `params.yaml` from before a run with overrides."""
    return layout.locks / "overrides.json"


def put_back(path: Path, note: Path) -> None:
    """Undo the overrides of the run that wrote `note`, unless `path` has changed; delete `note`."""
    if not note.exists():
        return
    try:
        left = read_checked(note)
    except ArtifactError as error:
        raise ParamsError(
            f"{note}, the copy of {path.name} from before a run with overrides, is damaged: "
            f"check the file (git diff {path.name}), restore it, and delete {note}"
        ) from error
    if digest(path.read_text()) == left["during"]:
        write_text(path, left["before"])
    elif path.read_bytes().decode() != left["before"]:
        logger.warning(
            "%s was changed during a run with overrides: keeping the changed file", path.name
        )
    note.unlink()
