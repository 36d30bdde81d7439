"""The inputs of a stage under DVC, at its start and at its end.

DVC digests the inputs of a stage after the stage's command has ended (dvc issue 11058), and would
record an input that was replaced meanwhile as the one that the stage read. So a stage fails if an
input differs at its end from its start, or if its code or its libraries differ from what the stage
`code` recorded. DVC then records nothing, and the next run repeats the stage.

The inputs are the files that the stage's entry in dvc.yaml names, the files of the cell's code, and
the folders that its settings name. A change that is undone before the end is not detected."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.common import params
from tasks.common.code import ROOT, digest_of_bytes, hexdigest, installed_version
from tasks.common.files import ArtifactError, digest_file, digest_folder, read_json
from tasks.common.layout import Layout

LARGE = 1 << 26  # bytes; a larger file has changed if its inode or its time has


@dataclass(frozen=True)
class Inputs:
    """The inputs as they were when the stage started: a mark of each file, and what the stage
    `code` recorded: digests of the cell's code and of the folders in its settings, and versions."""

    paths: tuple[Path, ...]
    marks: Mapping[str, str]
    recorded: Mapping[str, Any]
    note: Path

    @classmethod
    def at_start(
        cls, layout: Layout, name: str, recipe: str | None = None, seed: int | None = None
    ) -> "Inputs":
        """Read the inputs of a stage of the data root, which has an entry in its dvc.yaml. Raise
        ArtifactError if the code, a library or a folder has changed since the stage `code`."""
        entry = entry_of(layout, name, recipe, seed)
        settings = [Path(file) for each in entry["params"] for file in each]
        paths = (*map(Path, entry.get("deps", [])), *settings)
        of_cell = layout.code(name, recipe)
        code = read_json(of_cell) if of_cell in paths else {"files": {}, "versions": {}}
        folders = [params.load(path).get("inputs", {}) for path in settings]
        inputs = cls(paths, marks_of(paths), {**code, "folders": dict(*folders)}, layout.code_note)
        if late := inputs.changed_since_code():
            raise ArtifactError(
                f"{late[0]} changed after the stage code had recorded it: run again"
            )
        return inputs

    def check(self) -> None:
        """Raise ArtifactError if an input has changed since the start."""
        if late := changed(self.marks, marks_of(self.paths)) or self.changed_since_code():
            raise ArtifactError(
                f"{late[0]} changed while the stage ran: its outputs are void, and the next "
                "run repeats it"
            )

    def changed_since_code(self) -> list[str]:
        """Return what differs from the record of the stage `code`: files of the code, folders that
        the settings name, and libraries with another installed version."""
        seen = read_json(self.note) if self.note.exists() else {}
        files, versions, folders = (self.recorded[key] for key in ("files", "versions", "folders"))
        installed_version.cache_clear()
        installed = {name: installed_version(name) or versions[name] for name in versions}
        return [
            *changed(files, {name: code_digest(ROOT / name, seen.get(name)) for name in files}),
            *(f"the version of {name}" for name in changed(versions, installed)),
            *changed(folders, {name: digest_folder(Path(name), ("*",)) for name in folders}),
        ]


def changed(before: Mapping[str, str], now: Mapping[str, str | None]) -> list[str]:
    """Return the names with another value, or in only one of the two."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def is_under_dvc(layout: Layout) -> bool:
    """Return whether DVC runs this process as a stage of the data root."""
    return "DVC_STAGE" in os.environ and layout.code_params.exists()


def params_file(layout: Layout, named: Path) -> Path:
    """Return the parameter file that a stage reads: under DVC the copy that the stage `code` made,
    so that a change of params.yaml during a run reaches no stage; else the file `named`."""
    return layout.code_params if is_under_dvc(layout) else named


def entry_of(layout: Layout, name: str, recipe: str | None, seed: int | None) -> dict[str, Any]:
    """Return a stage's entry in the dvc.yaml of its data root, with the cell's recipe and seed."""
    own = layout.root / "dvc.yaml"  # the root `data` has its file at the top of the project
    text = (own if own.exists() else Path("dvc.yaml")).read_text()
    text = text.replace("${item.recipe}", str(recipe)).replace("${item.seed}", str(seed))
    entry: dict[str, Any] = yaml.safe_load(text)["stages"][name]
    return entry


def marks_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return a mark of every file of `paths`, also of those in folders. The mark is the content's
    digest; for a LARGE file its inode, time and size, so even a copy of it counts as changed."""
    marks = dict[str, str]()
    for file in [file for path in paths for file in (path, *path.rglob("*"))]:
        if file.is_file() and "__pycache__" not in file.parts:
            of = file.stat()
            large = f"{of.st_ino} {of.st_mtime_ns} {of.st_size}"
            marks[str(file)] = large if of.st_size > LARGE else digest_file(file)
    return marks


def code_digest(path: Path, seen: list[str] | None) -> str | None:
    """Return the digest of a file of the code, or None if it is missing or invalid. `seen` has the
    digests of its bytes and of its code when `code` ran, which saves parsing an unchanged file."""
    try:
        content = path.read_bytes()
        if seen and seen[0] == hexdigest(content):
            return seen[1]
        return digest_of_bytes(content, path.suffix)
    except (OSError, SyntaxError):
        return None
