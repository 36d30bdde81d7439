"""Data roots: folders with everything that a pipeline reads and writes, each with its own
`dvc.yaml`, `dvc.lock` and `params.yaml`.

The root `data` has its three files at the top of the project. Any other folder becomes a root when
it is first named: its `dvc.yaml` is derived from the project's file, and `params.yaml` is a copy
for the user to edit. A later round of a root is the root `rounds/N` below it; its parameters are
derived from the first round's, with another initial policy (see `tasks.common.config.derived`)."""

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
from tasks.common.files import temporary_folder, write_text
from tasks.common.layout import Layout
from tasks.common.params import ParamsError

MAIN = derived.MAIN
ROUND = re.compile(r"(?P<first>.+)/rounds/(?P<number>[1-9]\d*)")
NAME = re.compile(r"\w[\w.-]*")
MARKS = ("dvc.yaml", "params.yaml", "prompts")  # a folder with one of them is a data root


@dataclass(frozen=True)
class Root:
    """The data root of a round. `number` counts from 1; `first` is the first round's folder."""

    first: str = MAIN
    number: int = 1

    @property
    def folder(self) -> str:
        return self.first if self.number == 1 else f"{self.first}/rounds/{self.number}"

    @property
    def name(self) -> str:
        """Return the prefix of stage titles, such as `other, round 2`; empty for `data` itself."""
        words = [] if self.first == MAIN else [self.first]
        return ", ".join(words + ([f"round {self.number}"] if self.number > 1 else []))

    @property
    def is_main(self) -> bool:
        return self.folder == MAIN

    @property
    def earlier(self) -> list["Root"]:
        return [Root(self.first, number) for number in range(1, self.number)]

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
        """Return a stage as dvc names it: `data/rounds/2/dvc.yaml:profile`."""
        return stage if self.is_main else f"{self.pipeline}:{stage}"

    def titled(self, stage: str) -> str:
        """Return a stage as shown to the user: `round 2: profile`."""
        return f"{self.name}: {stage}" if self.name else stage

    def own(self, addresses: Iterable[str]) -> dict[str, str]:
        """Return the plain stage name for each of the `addresses` that is in this root."""
        prefix = "" if self.is_main else f"{self.pipeline}:"
        return {
            address: address.removeprefix(prefix)
            for address in addresses
            if address.startswith(prefix) and (prefix or ":" not in address)
        }


def root_of(folder: str) -> Root:
    """Return the root at a top-level folder or a round of one; else raise ParamsError."""
    path = PurePosixPath(os.path.normpath(folder)).as_posix()
    match = ROUND.fullmatch(path)
    root = Root(match["first"], int(match["number"])) if match else Root(path)
    if not NAME.fullmatch(root.first):
        raise ParamsError(
            f"--data {folder}: a data root is a folder at the top of the project, or a "
            f"round of one: {MAIN}, other, {MAIN}/rounds/2"
        )
    return root


def existing(folder: str) -> Root:
    """Return the root at `folder`. Raise ParamsError if it has no dvc.yaml, except for `data`."""
    root = root_of(folder)
    if not root.is_main and not (commands.ROOT / root.pipeline).exists():
        known = ", ".join(one.folder for one in every())
        raise ParamsError(f"{folder} is not a data root: it has no dvc.yaml; there are {known}")
    return root


def every() -> list[Root]:
    """Return all data roots of the project, `data` first."""
    files = commands.ROOT.glob("*/dvc.yaml"), commands.ROOT.glob("*/rounds/*/dvc.yaml")
    found = sorted(
        path.parent.relative_to(commands.ROOT).as_posix() for kind in files for path in kind
    )
    return [Root(), *map(root_of, found)]


def prepare_first(root: Root) -> None:
    """Write the missing or outdated files of a root that is not a later round; its parameters are
    copied only once. Raise ParamsError if it is a file, or has files but none of MARKS."""
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
    write_pipeline(root, None)


def prepare_round(root: Root, policy: str) -> None:
    """Write the files of a later round that starts from the policy in the folder `policy`."""
    first = Root(root.first)
    write(root.params, derived.parameters(first.params, first.folder, policy))
    link(root.layout.root / "prompts", f"{'../' * 2}prompts")
    earlier = tuple(other.folder for other in root.earlier)
    write_pipeline(root, derived.Round(earlier, policy))


def refresh(root: Root) -> None:
    """Bring the files of an existing later round up to date; its initial policy stays the same."""
    if root.params.exists():
        prepare_round(root, str(params.load(root.params)["policy"]["source"]))


def write_pipeline(root: Root, later: derived.Round | None) -> None:
    text = (commands.ROOT / "dvc.yaml").read_text()
    write(root.layout.root / ".gitignore", derived.IGNORED)
    write(root.file("dvc.yaml"), derived.pipeline(text, root.folder, later))


def write(path: Path, text: str) -> None:
    """Write a file atomically, unless it contains this text already."""
    if not path.exists() or path.read_text() != text:
        write_text(path, text)


def link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, atomically. Raise ParamsError if a file is there."""
    if path.is_symlink() and os.readlink(path) == target:
        return
    if path.exists() and not path.is_symlink():
        raise ParamsError(f"{path} exists: move it; a later round links to the first one's prompts")
    with temporary_folder(path.parent, path.name) as temporary:
        os.symlink(target, temporary / path.name)
        os.replace(temporary / path.name, path)


def own_needs(root: Root, graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return this root's part of dvc's graph, by plain stage name. Raise CommandError if empty."""
    names = root.own(graph)
    if not names:
        raise commands.CommandError(f"dvc cannot find {root.pipeline}: does git ignore it?")
    return {
        name: {names[need] for need in graph[address] if need in names}
        for address, name in names.items()
    }
