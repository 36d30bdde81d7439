"""Values of params.yaml for one run: `train.learning_rate=1e-4`, as `dvc exp run -S` has them.

They stand in the file while the run lasts, where DVC and the stages read them, and dvc.lock keeps
them with the results. Then the file is what it was before. A run that was killed leaves a note,
from which the next one puts the file back."""

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.common import params
from tasks.common.files import ArtifactError, digest, temporary_folder, write_text
from tasks.common.layout import Layout
from tasks.common.overrides import overridden
from tasks.common.params import CELL_NAME, ParamsError
from tasks.common.sealed import read_sealed, write_sealed

logger = logging.getLogger(__name__)

NUMBER = r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
SECTIONS = (  # whose numbers may come from elsewhere; not engine, policy, store, tracking, verify
    *("experiment", "gates", "profile", "sampling", "allocate", "train", "learner", "guards"),
    *("checkpoint", "evaluate", "report", "recipes"),
)
FROM_ELSEWHERE = re.compile(
    rf"({'|'.join(SECTIONS)})(\.[\w-]+)+={NUMBER}"
    rf"|experiment\.recipes=\[{CELL_NAME.pattern}(, ?{CELL_NAME.pattern})*\]"
    r"|experiment\.seeds=\[\d+(, ?\d+)*\]",
    re.ASCII,
)


def check_from_elsewhere(overrides: list[str]) -> None:
    """Raise ParamsError for one that may not come through Prefect's API, to which others than the
    project's owner may write: all but numbers, recipes and seeds could name a file or a server."""
    for override in overrides:
        if not FROM_ELSEWHERE.fullmatch(override):
            key = override.partition("=")[0]
            raise ParamsError(
                f"{key} is not set through Prefect's API, which takes numbers of "
                f"{', '.join(SECTIONS)}, and experiment.recipes=[NAME,...] and "
                "experiment.seeds=[0,...]: set it in params.yaml"
            )


@contextmanager
def applied(path: Path, layout: Layout, overrides: list[str]) -> Iterator[None]:
    """Have the file at `path` hold the overrides. For one run at a time: the caller has the
    pipeline's lock. Raises ParamsError, and changes nothing, for a key that the file has not."""
    note = note_of(layout)
    put_back(path, note)
    if not overrides:
        yield
        return
    before = path.read_text()
    during = overridden(path, overrides)
    check(during)
    write_sealed(note, {"before": before, "during": digest(during)})
    write_text(path, during)
    try:
        yield
    finally:
        put_back(path, note)
    logger.warning(
        "%s is as before; what stands in data/ was made with %s",
        path.name,
        ", ".join(overrides),
    )


def check(text: str) -> None:
    """Raise ParamsError for parameters that no stage would read."""
    with temporary_folder(None, "winnow-overrides") as folder:
        write_text(folder / "params.yaml", text)
        values = params.load(folder / "params.yaml")
    importlib.import_module("tasks.code.effective").complete(values)


def note_of(layout: Layout) -> Path:
    """Return where a run with overrides notes what the file was before."""
    return layout.locks / "overrides.json"


def put_back(path: Path, note: Path) -> None:
    """Undo the overrides of the run that left the note, unless the file was changed since."""
    if not note.exists():
        return
    try:
        left = read_sealed(note)
    except ArtifactError as error:
        raise ParamsError(
            f"{note}, which says what {path.name} was before a run with overrides, is damaged: "
            f"look at the file (git diff {path.name}), put it back, and delete {note}"
        ) from error
    if digest(path.read_text()) == left["during"]:
        write_text(path, left["before"])
    elif path.read_text() != left["before"]:
        logger.warning(
            "%s was changed during a run with overrides: it stays as it is now", path.name
        )
    note.unlink()
