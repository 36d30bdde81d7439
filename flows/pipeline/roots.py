"""Data roots: folders with everything that a pipeline reads and writes, each with its own
`dvc.yaml`, `dvc.lock` and `params.yaml`.

The root `data` has its three files at the top of the project. Any other folder becomes a root when
it is first named: its `dvc.yaml` is derived from the project's file (see
`tasks.common.config.derived`), and `params.yaml` is a copy for the user to edit."""

import importlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flows.pipeline import commands
from tasks.common import params
from tasks.common.config import derived
from tasks.common.files import write_text
from tasks.common.layout import Layout
from tasks.common.params import ParamsError

MAIN = derived.MAIN
NAME = re.compile(r"\w[\w.-]*")
MARKS = ("dvc.yaml", "params.yaml", "prompts")  # a folder with one of them is a data root


@dataclass(frozen=True)
class Root:
    """A data root, by its folder's name."""

    folder: str = MAIN

    @property
    def is_main(self) -> bool:
        return self.folder == MAIN

    @property
    def layout(self) -> Layout:
        return Layout(commands.ROOT / self.folder)

    @property
    def params(self) -> Path:
        return self.file("params.yaml")

    @property
    def values(self) -> dict[str, Any]:
        """Return the root's parameters, completed with the defaults."""
        effective = importlib.import_module("tasks.code.effective")
        return dict(effective.complete(params.load(self.params)))

    @property
    def lock(self) -> Path:
        return self.file("dvc.lock")

    @property
    def lock_copy(self) -> Path:
        """Return the path of the copy of dvc.lock during a run (see `lock.restore`)."""
        return self.layout.locks / "dvc.lock"

    @property
    def pipeline(self) -> str:
        """Return the path of the root's `dvc.yaml` relative to the project, as dvc requires it."""
        return self.file("dvc.yaml").relative_to(commands.ROOT).as_posix()

    def file(self, name: str) -> Path:
        return commands.ROOT / name if self.is_main else commands.ROOT / self.folder / name

    def address(self, stage: str) -> str:
        """Return a stage as dvc names it: `other/dvc.yaml:profile`."""
        return stage if self.is_main else f"{self.pipeline}:{stage}"

    def titled(self, stage: str) -> str:
        """Return a stage as shown to the user: `other: profile`, or `profile` of `data`."""
        return stage if self.is_main else f"{self.folder}: {stage}"

    def own(self, addresses: Iterable[str]) -> dict[str, str]:
        """Return the plain stage name for each of the `addresses` that is in this root."""
        prefix = "" if self.is_main else f"{self.pipeline}:"
        return {
            address: address.removeprefix(prefix)
            for address in addresses
            if address.startswith(prefix) and (prefix or ":" not in address)
        }


def root_of(folder: str) -> Root:
    """Return the root at a top-level folder; else raise ParamsError."""
    path = PurePosixPath(os.path.normpath(folder)).as_posix()
    if not NAME.fullmatch(path):
        raise ParamsError(
            f"--data {folder}: a data root is a folder at the top of the project: {MAIN}, other"
        )
    return Root(path)


def existing(folder: str) -> Root:
    """Return the root at `folder`; one that has only its params.yaml gets a dvc.yaml. Raise
    ParamsError if it has neither, except for `data`."""
    root = root_of(folder)
    if not root.is_main and not (commands.ROOT / root.pipeline).exists():
        if not root.params.exists():
            known = ", ".join(one.folder for one in every())
            raise ParamsError(f"{folder} is not a data root: it has no dvc.yaml; there are {known}")
        prepare(root)
    return root


def every() -> list[Root]:
    """Return all data roots of the project, `data` first."""
    return [Root(), *(Root(path.parent.name) for path in sorted(commands.ROOT.glob("*/dvc.yaml")))]


def prepare(root: Root) -> None:
    """Write the missing or outdated files of a root; its parameters are copied only once. Raise
    ParamsError if it is a file, or has files but none of MARKS."""
    if root.is_main:
        path = root.file("dvc.yaml")
        if path.read_text().startswith(derived.OWN):
            write(path, derived.own_pipeline((commands.CODE / "dvc.yaml").read_text()))
        return
    folder = root.layout.root
    is_used = folder.is_file() or (folder.exists() and any(folder.iterdir()))
    if is_used and not any((folder / name).exists() for name in MARKS):
        what = "is a file" if folder.is_file() else "contains other files"
        raise ParamsError(f"{root.folder} {what}: use a new folder with --data")
    if not root.params.exists():
        params.load(commands.ROOT / "params.yaml")  # refuses to copy a password
        write(root.params, (commands.ROOT / "params.yaml").read_text())
    text = (commands.ROOT / "dvc.yaml").read_text()
    write(folder / ".gitignore", derived.IGNORED)
    write(root.file("dvc.yaml"), derived.pipeline(text, root.folder))


def write(path: Path, text: str) -> None:
    """Write a file atomically, unless it contains this text already."""
    if not path.exists() or path.read_text() != text:
        write_text(path, text)


def own_needs(root: Root, graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return this root's part of dvc's graph, by plain stage name. Raise CommandError if empty."""
    names = root.own(graph)
    if not names:
        raise commands.CommandError(f"dvc cannot find {root.pipeline}: does git ignore it?")
    return {
        name: {names[need] for need in graph[address] if need in names}
        for address, name in names.items()
    }
