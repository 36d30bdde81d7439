"""Checkpoints: a killed run goes on where it was, with the same result as if it had not been
killed.

They live in `checkpoints/<key>/` under the data root, where key is the digest of all that the
result depends on: policy, prompts, plan, effective parameters, seed. The same key resumes; another
key is another run and starts from the beginning. A checkpoint is a folder that appears whole
(temporary name, flush, rename) and carries the digests of its files; a damaged one is passed over
for the one before. Tensors are safetensors: nothing here can execute anything.

The rollouts since the checkpoint before are a part of their own beside the checkpoints, which is
written once and named by its content. Every later checkpoint needs it. Where one is damaged,
training goes on from the newest checkpoint that does not need it, or starts over where none is
left: a run repeats exactly, so the steps that are made again give the same outputs, and the record
of a run never lacks steps.

While a decayed branch runs, its checkpoints stand beside the trunk's, under names that end in
`-branch`, and the trunk's newest is kept: it is what the branch left, and goes back to."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import save_file

from tasks.common.files import (
    ArtifactError,
    WriteError,
    digest,
    digest_file,
    follow_folder,
    make_folder,
    make_private_folder,
    replace_file,
    sync_folder,
    writing,
)
from tasks.common.sealed import read_note, read_sealed, write_sealed
from tasks.train.checkpoint.stored import (
    BRANCH,
    Loaded,
    checkpoints_in,
    is_branch,
    read_checkpoint,
    read_index,
    read_parts,
    sequence,
    trunk_of,
    verified_index,
)
from tasks.train.checkpoint.tensors import WHOLE, shard_name

logger = logging.getLogger(__name__)

SHARDS = ".shards"  # the folder of what every rank wrote, until the checkpoint takes it over
WORK = "work.json"  # the file of executed work


@dataclass(frozen=True)
class Snapshot:
    """A copy of all that a run needs to go on after `step` steps. `part` has the rollouts since the
    checkpoint before. `shards` are the files of tensors that the ranks wrote themselves, by name,
    with their digests."""

    step: int
    tensors: dict[str, torch.Tensor]
    shards: Mapping[str, str]
    state: Mapping[str, Any]
    tables: Mapping[str, pl.DataFrame]
    part: pl.DataFrame | None


class Checkpoints:
    """The checkpoints of one run, the parts of its rollout table, and a file that says how much
    work was executed, and how much of it was lost to kills.

    Writing happens behind the training: `save` returns at once, `wait` makes sure. Who copies what
    is to be saved waits first, so that two copies never exist.
    """

    def __init__(self, root: Path, components: Mapping[str, Any], keep: int) -> None:
        self.folder, self.keep = root / digest(dict(components)), keep
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        self.saved = time.monotonic()
        self.parts: list[str] = []  # of the last checkpoint that was written or read, in order
        for deleted in root.glob(".deleted-*"):  # by a run that was killed while it tidied up
            shutil.rmtree(deleted, ignore_errors=True)
        make_private_folder(root)
        if not self.folder.exists():
            log_what_changed(root, components)
        if not is_key(self.folder / "key.json", components):
            write_sealed(self.folder / "key.json", components)

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint in the background, the one before being done."""
        self.wait()
        self.writing = self.writer.submit(self.write, snapshot)
        self.saved = time.monotonic()

    def seconds_ago(self) -> float:
        """The seconds since the last checkpoint of this process, or since it began."""
        return time.monotonic() - self.saved

    def wait(self) -> None:
        """Return when what was saved is on the disk; raises what went wrong with it."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def write(self, snapshot: Snapshot) -> None:
        """Write the part of the rollouts, then the checkpoint that makes it count, then let the
        oldest ones go. Raises WriteError, and leaves the earlier ones, where there is no room."""
        unique = name_in(self.folder, snapshot.step, on_branch=snapshot.state["branch"] is not None)
        try:
            with writing(self.folder / unique):
                self.write_under(unique, snapshot)
        except WriteError:
            shutil.rmtree(self.folder / f".{unique}", ignore_errors=True)
            raise
        sync_folder(self.folder)
        written = self.folder / unique
        # a branch is at its end when the trunk goes on
        ended = [path for path in self.steps() if is_branch(path) and not is_branch(written)]
        going = [path for path in self.steps() if path not in ended]
        for old in {*ended, *going[: -self.keep]} - {trunk_of(written)}:
            shutil.rmtree(old)
        for unfinished in self.folder.glob(".step-*"):
            shutil.rmtree(unfinished)
        self.drop_unused_parts()

    def write_part(self, rollouts: pl.DataFrame) -> str:
        """Write rollouts under a name that says their steps and holds the digest of the file.
        Return it. What already has the name is replaced: it may be damaged."""
        written = self.folder / ".part.parquet"
        replace_file(written, lambda file: rollouts.write_parquet(file))
        first, last = rollouts["step"][0], rollouts["step"][-1]
        name = f"rollouts-{first:09d}-{last:09d}-{digest_file(written)}.parquet"
        os.replace(written, self.folder / name)
        return name

    def drop_unused_parts(self) -> None:
        """Delete the parts of rollouts that no checkpoint here needs any more."""
        used = {name for path in self.steps() for name in read_parts(path)} | set(self.parts)
        for part in self.folder.glob("rollouts-*.parquet"):
            if part.name not in used:
                part.unlink()

    def write_under(self, unique: str, snapshot: Snapshot) -> None:
        """Write the part of the rollouts, and the checkpoint of that name."""
        if snapshot.part is not None:
            self.parts = [*self.parts, self.write_part(snapshot.part)]
        final, temporary = self.folder / unique, self.folder / f".{unique}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a write that was killed
        make_folder(temporary)
        save_file(snapshot.tensors, temporary / WHOLE)
        for name, table in snapshot.tables.items():
            table.write_parquet(temporary / f"{name}.parquet")
        files = {path.name: digest_file(path) for path in sorted(temporary.iterdir())}
        for name in files:
            flush(temporary / name)
        for name in snapshot.shards:
            os.rename(self.folder / SHARDS / name, temporary / name)
        files |= snapshot.shards
        index = {"files": files, "parts": self.parts, "state": snapshot.state}
        write_sealed(temporary / "state.json", index)
        os.rename(temporary, final)

    def clear_shards(self) -> None:
        """Make an empty folder for the ranks' files: what a kill left there belongs to nothing."""
        shutil.rmtree(self.folder / SHARDS, ignore_errors=True)
        make_folder(self.folder / SHARDS)

    def write_shard(
        self, rank: int, size: int, tensors: dict[str, torch.Tensor]
    ) -> tuple[str, str]:
        """Write what one rank holds; the file's name and digest, for the Snapshot."""
        path = self.folder / SHARDS / shard_name(rank, size)
        save_file(tensors, path)
        flush(path)
        return path.name, digest_file(path)

    def steps(self) -> list[Path]:
        """The folders of complete checkpoints, in the order in which they were written: back from a
        branch, the trunk's steps are lower again."""
        return checkpoints_in(self.folder)

    def trunk(self) -> Loaded:
        """The newest checkpoint of the trunk, to which a branch goes back. Raises ArtifactError
        where it is missing or damaged."""
        self.wait()
        return self.read(trunk_of(self.steps()[-1]))

    def load(self, chosen: Path | None = None) -> Loaded | None:
        """The checkpoint `chosen`, or the newest that is whole, or None. A damaged one is named in
        a warning and passed over, and so is one with a damaged part of the rollouts. ArtifactError
        when it was chosen, or when `chosen` is another run's."""
        if chosen is not None:
            self.check_fit(chosen)
            try:
                return self.read(chosen)
            except ArtifactError as error:
                raise ArtifactError(
                    f"--resume {chosen}: the checkpoint is damaged: {error}. Name another, or "
                    "leave --resume out to go on from the newest that is whole"
                ) from error
        for folder in reversed(self.steps()):
            try:
                return self.read(folder)
            except ArtifactError as error:
                logger.warning("passing over the damaged checkpoint %s: %s", folder, error)
        if self.steps():
            logger.warning(
                "no checkpoint in %s is whole: starting over from the first step, which gives the "
                "same outputs unless a setting depends on the clock",
                self.folder,
            )
        return None

    def branch_from(self, chosen: Path) -> None:
        """Go on from `chosen`, which was loaded: the branch that it leaves is retired.

        Newer checkpoints left here would be what the next restart goes on from, and `keep` would
        let the new branch's go first. They are moved to a folder `retired-...` with the parts of
        rollouts that they name. They are not deleted: `--resume` of one of them takes a mistake
        back. A checkpoint of another folder is copied here first, and all that is here is retired.
        """
        is_here = chosen.parent.resolve() == self.folder.resolve()
        newer = [path for path in self.steps() if not is_here or sequence(path) > sequence(chosen)]
        if is_here and not newer:
            return
        # what was executed after `chosen` was not lost by a kill
        self.note_work(read_index(chosen)["state"].get("work", {}))
        retired = self.folder / f"retired-{time.time_ns()}"
        if newer:
            retired.mkdir()
            shutil.copy(self.folder / "key.json", retired)
            # under second names: others may need here what these need
            copy_checkpoints(newer, retired, os.link)
        if not is_here:
            copy_checkpoints([chosen], self.folder, shutil.copy)
        for path in newer:
            shutil.rmtree(path)
        sync_folder(self.folder)
        if newer:
            logger.warning(
                "going on from %s: the %d checkpoints of the branch that it leaves are now in %s",
                chosen.name,
                len(newer),
                retired,
            )

    def read(self, folder: Path) -> Loaded:
        """One checkpoint, the parts it names checked with it; a branch's also for the trunk that it
        goes back to."""
        loaded, parts = read_checkpoint(folder)
        state = loaded[1]
        if (state["branch"] is not None) != is_branch(folder):
            raise ArtifactError("an earlier version wrote it, which kept branches in another form")
        if is_branch(folder):
            trunk = verified_index(trunk_of(folder))["state"]
            if trunk["num_steps"] != state["branch_start"]:
                raise ArtifactError(
                    f"it is of a branch that left the trunk after {state['branch_start']} steps, "
                    f"and the trunk's newest is of {trunk['num_steps']}"
                )
        self.parts = parts
        return loaded

    def check_fit(self, chosen: Path) -> None:
        """Raise ArtifactError, naming what differs, unless `chosen` is a checkpoint of a run like
        this one."""
        mine = read_sealed(self.folder / "key.json")
        try:
            theirs = read_sealed(chosen.parent / "key.json")
        except ArtifactError as error:
            raise ArtifactError(
                f"--resume {chosen}: which run it is of is not known, since "
                f"{chosen.parent / 'key.json'} is missing or damaged. Name a checkpoint of another "
                "folder, or leave --resume out"
            ) from error
        if different := [name for name in mine if mine[name] != theirs.get(name)]:
            raise ArtifactError(
                f"--resume {chosen} does not fit this run: {', '.join(different)} differ. Leave "
                "--resume out to start "
                "over, or set the parameters back"
            )

    def note_work(self, executed: Mapping[str, float]) -> None:
        """Note what a run has executed so far, so that what a kill throws away can be counted."""
        lost = read_note(self.folder / WORK).get("lost", {})
        write_sealed(self.folder / WORK, {"executed": executed, "lost": lost})

    def count_lost(self, executed: Mapping[str, float]) -> dict[str, float]:
        """All work of this key that no checkpoint holds, where a run has now `executed` so much:
        what was noted beyond that, and what earlier kills lost."""
        note = read_note(self.folder / WORK)
        noted, before = note.get("executed", {}), note.get("lost", {})
        lost = {
            name: before.get(name, 0.0) + noted.get(name, value) - value
            for name, value in executed.items()
        }
        # at once, so that a kill cannot count it twice
        write_sealed(self.folder / WORK, {"executed": executed, "lost": lost})
        return lost

    def delete(self) -> None:
        """The run has succeeded: nothing is left to resume."""
        deleted = self.folder.with_name(f".deleted-{self.folder.name}")
        os.rename(self.folder, deleted)  # at once: half a folder would be a run that cannot end
        # another run of this data root may be removing it already, as a killed one's
        shutil.rmtree(deleted, ignore_errors=True)


def name_in(folder: Path, step: int, *, on_branch: bool) -> str:
    """The name of the next checkpoint in a folder: its step, its place in the order of writing, and
    whether it is a branch's."""
    last = max(map(sequence, checkpoints_in(folder)), default=0)
    return f"step-{step:09d}-{last + 1:06d}{BRANCH if on_branch else ''}"


def copy_checkpoints(chosen: Sequence[Path], folder: Path, copy: Callable[[Any, Any], Any]) -> None:
    """Copy checkpoints to another folder, by `copy` of each file, with all that they need: the
    parts of rollouts beside them, and the trunk's checkpoint that a branch goes back to."""
    needed = {*chosen} | {trunk_of(path) for path in chosen if is_branch(path)}
    for name in {name for path in needed for name in read_parts(path)}:
        if (path := chosen[0].parent / name).exists():
            copy(path, folder / f".{name}")
            os.replace(folder / f".{name}", folder / name)
    for path in sorted(needed, key=sequence):
        name = name_in(folder, int(path.name.split("-")[1]), on_branch=is_branch(path))
        shutil.rmtree(folder / f".{name}", ignore_errors=True)
        shutil.copytree(path, folder / f".{name}", copy_function=copy)
        os.rename(folder / f".{name}", folder / name)


def is_key(path: Path, components: Mapping[str, Any]) -> bool:
    """Whether a file with what a run depends on is there and whole."""
    try:
        return read_sealed(path) == components
    except ArtifactError:
        return False


def flush(path: Path) -> None:
    """Flush a written file to the disk, its mode that of the folder."""
    follow_folder(path, 0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def log_what_changed(root: Path, components: Mapping[str, Any]) -> None:
    """Say why a fresh start is one, when another checkpoint of the same recipe and seed is
    there."""
    for path in sorted(root.glob("*/key.json")):
        try:
            other = read_sealed(path)
            is_same = all(other[name] == components[name] for name in ("recipe", "seed"))
        except ArtifactError as error:
            logger.warning("passing over the checkpoints in %s: %s", path.parent, error)
            continue
        if is_same:
            changed = [name for name in components if components[name] != other.get(name)]
            logger.info(
                "starting over: %s changed since the checkpoint %s",
                ", ".join(changed),
                path.parent.name,
            )
