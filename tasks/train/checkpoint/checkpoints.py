"""Checkpoints: a killed run resumes where it stopped, with the same result as an uninterrupted run.

They are in `checkpoints/<key>/` under the data root. The key is the digest of everything that the
result depends on: policy, prompts, plan, effective parameters, seed, code. A run with the same key
resumes; a run with another key starts from the beginning. Only `--resume` can continue from a
checkpoint that other code wrote. A checkpoint is a folder that is created atomically (temporary
name, flush, rename) and contains the digests of its files. A damaged one is skipped in favour of
the one before. Tensors are safetensors: no file here can execute code.

The rollouts since the previous checkpoint are a separate file next to the checkpoints. It is
written once and named by its content, and every later checkpoint needs it. If such a file is
damaged, training resumes from the newest checkpoint that does not need it, or starts over if there
is none. A run is deterministic, so the repeated steps produce the same outputs, and no step is
missing from the record of a run.

While a decayed branch runs, its checkpoints are beside the trunk's. Their names end in `-branch`.
The trunk's newest checkpoint is kept: the branch started there, and training returns to it."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from pyarrow.parquet import ParquetFile
from safetensors.torch import save_file

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked, read_note, write_checked
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
from tasks.train.checkpoint.folder import (
    BRANCH,
    NAME,
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

SHARDS = ".shards"  # the folder of the ranks' files, until they move into the checkpoint
WORK = "work.json"  # the file of executed work
ROWS = 2048  # rollouts in memory at once when all are read


@dataclass(frozen=True)
class Snapshot:
    """A copy of the whole state that a run needs to resume after `step` steps. `part` contains the
    rollouts since the previous checkpoint. `shards` contains the digest of each tensor file that a
    rank wrote, by name."""

    step: int
    tensors: dict[str, torch.Tensor]
    shards: Mapping[str, str]
    state: Mapping[str, Any]
    tables: Mapping[str, pl.DataFrame]
    part: pl.DataFrame | None


class Checkpoints:
    """The checkpoints of one run, the parts of its rollout table, and a file that records the
    executed work and the work lost to kills.

    `save` writes in the background and returns at once; `wait` blocks until the write is done. A
    caller waits before it makes the next copy, so two copies never exist at once.
    """

    def __init__(self, root: Path, components: Mapping[str, Any], keep: int) -> None:
        self.components = dict(components)
        self.folder, self.keep = root / digest(self.components), keep
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        self.saved = time.monotonic()
        self.parts: list[str] = []  # of the last checkpoint that was written or read, in order
        for deleted in root.glob(".deleted-*"):  # by a run that was killed during cleanup
            shutil.rmtree(deleted, ignore_errors=True)
        make_private_folder(root)
        if not self.folder.exists():
            log_what_changed(root, components)
        if read_note(self.folder / "key.json") != components:
            write_checked(self.folder / "key.json", components)

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint in the background, after the previous write has ended."""
        self.wait()
        self.writing = self.writer.submit(self.write, snapshot)
        self.saved = time.monotonic()

    def seconds_ago(self) -> float:
        """Return the seconds since this process last saved a checkpoint, or since it started."""
        return time.monotonic() - self.saved

    def wait(self) -> None:
        """Wait until the saved checkpoint is on disk; raise the error of a failed write."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def write(self, snapshot: Snapshot) -> None:
        """Write the part of the rollouts, then the checkpoint that refers to it, then delete
        outdated checkpoints. If the disk is full, raise WriteError and delete none."""
        unique = name_in(self.folder, snapshot.step, on_branch=snapshot.state["branch"] is not None)
        try:
            with writing(self.folder / unique):
                self.write_under(unique, snapshot)
        except WriteError:
            shutil.rmtree(self.folder / f".{unique}", ignore_errors=True)
            raise
        sync_folder(self.folder)
        written = self.folder / unique
        # a branch has ended when the trunk resumes
        ended = [path for path in self.steps() if is_branch(path) and not is_branch(written)]
        going = [path for path in self.steps() if path not in ended]
        for old in {*ended, *going[: -self.keep]} - {trunk_of(written)}:
            shutil.rmtree(old)
        for unfinished in self.folder.glob(".step-*"):
            shutil.rmtree(unfinished)
        self.drop_unused_parts()

    def write_part(self, rollouts: pl.DataFrame) -> str:
        """Write rollouts to a file named by their first and last step and its digest; return the
        name. Replace a file that already has this name: it may be damaged."""
        written = self.folder / ".part.parquet"
        replace_file(written, lambda file: rollouts.write_parquet(file))
        first, last = rollouts["step"][0], rollouts["step"][-1]
        name = f"rollouts-{first:09d}-{last:09d}-{digest_file(written)}.parquet"
        os.replace(written, self.folder / name)
        return name

    def rollouts(self) -> Iterator[pl.DataFrame]:
        """Yield the rollouts of the last checkpoint in tables of ROWS rows. The sizes of the parts
        differ after a kill, but the tables do not, so the result file is the same."""
        rest = TRAIN_ROLLOUTS.frame([])
        for name in self.parts:
            # by a small buffer: Arrow would otherwise read the whole part, which is a row group
            path = self.folder / name
            with ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
                for batch in file.iter_batches(ROWS, use_threads=False):
                    rest = pl.concat([rest, pl.DataFrame(batch)])
                    if len(rest) >= ROWS:
                        yield rest[:ROWS].rechunk()
                        rest = rest[ROWS:]
        if len(rest):
            yield rest.rechunk()

    def drop_unused_parts(self) -> None:
        """Delete the parts of rollouts that no checkpoint here needs any more."""
        used = {name for path in self.steps() for name in read_parts(path)} | set(self.parts)
        for part in self.folder.glob("rollouts-*.parquet"):
            if part.name not in used:
                part.unlink()

    def write_under(self, unique: str, snapshot: Snapshot) -> None:
        """Write the part with new rollouts, then the checkpoint in the folder `unique`."""
        if snapshot.part is not None:
            self.parts = [*self.parts, self.write_part(snapshot.part)]
        final, temporary = self.folder / unique, self.folder / f".{unique}"
        shutil.rmtree(temporary, ignore_errors=True)  # from a write that was killed
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
        write_checked(temporary / "state.json", index)
        os.rename(temporary, final)

    def clear_shards(self) -> None:
        """Make an empty folder for the ranks' files; delete the files of a killed write."""
        shutil.rmtree(self.folder / SHARDS, ignore_errors=True)
        make_folder(self.folder / SHARDS)

    def write_shard(
        self, rank: int, size: int, tensors: dict[str, torch.Tensor]
    ) -> tuple[str, str]:
        """Write one rank's rows of tensors; return the file's name and digest, for the Snapshot."""
        path = self.folder / SHARDS / shard_name(rank, size)
        save_file(tensors, path)
        flush(path)
        return path.name, digest_file(path)

    def steps(self) -> list[Path]:
        """Return the folders of complete checkpoints in the order of writing. After a branch, the
        step numbers drop back to those of the trunk."""
        return checkpoints_in(self.folder)

    def trunk(self) -> Loaded:
        """Return the newest checkpoint of the trunk, where the branch started. Raise ArtifactError
        if it is missing or damaged."""
        self.wait()
        return self.read(trunk_of(self.steps()[-1]))

    def load(self, checkpoint: Path | None = None) -> Loaded | None:
        """Return the given `checkpoint`, or the newest intact one, or None. Skip a damaged
        checkpoint, or one with a damaged part of the rollouts, with a warning. Raise ArtifactError
        if `checkpoint` is damaged or belongs to another run."""
        if checkpoint is not None:
            self.check_fit(checkpoint)
            try:
                return self.read(checkpoint)
            except ArtifactError as error:
                raise ArtifactError(
                    f"--resume {checkpoint}: the checkpoint is damaged: {error}. Name another, or "
                    "omit --resume to resume from the newest intact one"
                ) from error
        for folder in reversed(self.steps()):
            try:
                return self.read(folder)
            except ArtifactError as error:
                logger.warning("skipping the damaged checkpoint %s: %s", folder, error)
        if self.steps():
            logger.warning(
                "no checkpoint in %s is intact: starting over from the first step, which gives the "
                "same outputs unless a setting depends on the clock",
                self.folder,
            )
        return None

    def branch_from(self, checkpoint: Path) -> None:
        """Unless the loaded `checkpoint` is the newest, make a copy of it the newest, so
        that the next restart resumes there. Those after `checkpoint` stay until `keep` newer ones
        are written; until then, a run resumed by mistake can return to one of them."""
        if self.steps() and checkpoint.resolve() == self.steps()[-1].resolve():
            return
        # the work executed after `checkpoint` was not lost by a kill
        self.note_work(read_index(checkpoint)["state"].get("work", {}))
        copy_checkpoint(checkpoint, self.folder)
        logger.warning("resuming from %s, which is now the newest checkpoint", checkpoint.name)

    def read(self, folder: Path) -> Loaded:
        """Read one checkpoint and verify its parts. For a checkpoint of a branch, also verify the
        trunk's checkpoint from which the branch started."""
        loaded, parts = read_checkpoint(folder)
        state = loaded[1]
        if is_branch(folder):
            trunk = verified_index(trunk_of(folder))["state"]
            if trunk["num_steps"] != state["branch_start"]:
                raise ArtifactError(
                    f"its branch left the trunk after {state['branch_start']} steps, but the "
                    f"trunk's newest checkpoint is after {trunk['num_steps']}"
                )
        self.parts = parts
        return loaded

    def check_fit(self, checkpoint: Path) -> None:
        """Raise ArtifactError, naming the differences, if `checkpoint` is of a run with another
        key, or was renamed. Log only a warning if nothing but the code differs."""
        mine = read_checked(self.folder / "key.json")
        try:
            theirs = read_checked(checkpoint.parent / "key.json")
        except ArtifactError as error:
            raise ArtifactError(
                f"--resume {checkpoint}: cannot check which run it belongs to: "
                f"{checkpoint.parent / 'key.json'} is missing or damaged. Name a checkpoint of "
                "another folder, or omit --resume"
            ) from error
        if not NAME.fullmatch(checkpoint.name):
            raise ArtifactError(
                f"--resume {checkpoint}: restore the checkpoint's name, such as "
                "step-000000012-000004"
            )
        different = [name for name in mine if mine[name] != theirs.get(name)]
        if different == ["code"]:
            logger.warning("--resume %s: its steps were made by other code", checkpoint)
        elif different:
            raise ArtifactError(
                f"--resume {checkpoint} belongs to another run: {', '.join(different)} differ. "
                "Omit --resume to start over, or restore the parameters"
            )

    def note_work(self, executed: Mapping[str, float]) -> None:
        """Record the work executed so far, so that work lost to a kill can be counted."""
        lost = read_note(self.folder / WORK).get("lost", {})
        write_checked(self.folder / WORK, {"executed": executed, "lost": lost})

    def count_lost(self, executed: Mapping[str, float]) -> dict[str, float]:
        """Return and record the work that this run has lost to kills: earlier losses, plus the
        recorded work, minus `executed` (the work in the state from which the run resumes)."""
        note = read_note(self.folder / WORK)
        noted, before = note.get("executed", {}), note.get("lost", {})
        lost = {
            name: before.get(name, 0.0) + noted.get(name, value) - value
            for name, value in executed.items()
        }
        # at once, so that a kill cannot count it twice
        write_checked(self.folder / WORK, {"executed": executed, "lost": lost})
        return lost

    def delete(self) -> None:
        """Delete all checkpoints of a run that succeeded."""
        deleted = self.folder.with_name(f".deleted-{self.folder.name}")
        os.rename(self.folder, deleted)  # atomic: a partly deleted folder would look resumable
        # another run with this data root may already be removing it, as the folder of a killed run
        shutil.rmtree(deleted, ignore_errors=True)


def name_in(folder: Path, step: int, *, on_branch: bool) -> str:
    """Return the name of the next checkpoint in a folder: its step, its position in the order of
    writing, and a suffix for a branch."""
    last = max(map(sequence, checkpoints_in(folder)), default=0)
    return f"step-{step:09d}-{last + 1:06d}{BRANCH if on_branch else ''}"


def copy_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint into a folder, as its newest one, with everything that it needs: its parts
    of rollouts, and the trunk's checkpoint where a branch started."""
    is_here = checkpoint.parent.resolve() == folder.resolve()
    copy: Callable[[Any, Any], Any] = os.link if is_here else shutil.copy
    for name in [] if is_here else read_parts(checkpoint):
        shutil.copy(checkpoint.parent / name, folder / f".{name}")
        os.replace(folder / f".{name}", folder / name)
    for path in dict.fromkeys([trunk_of(checkpoint), checkpoint]):
        name = name_in(folder, int(path.name.split("-")[1]), on_branch=is_branch(path))
        shutil.rmtree(folder / f".{name}", ignore_errors=True)
        shutil.copytree(path, folder / f".{name}", copy_function=copy)
        os.rename(folder / f".{name}", folder / name)
    sync_folder(folder)


def flush(path: Path) -> None:
    """Flush a written file to disk, and set its mode according to the folder's mode."""
    follow_folder(path, 0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def log_what_changed(root: Path, components: Mapping[str, Any]) -> None:
    """Log what differs in `components` from each checkpoint of the same recipe and seed."""
    for path in sorted(root.glob("*/key.json")):
        try:
            other = read_checked(path)
            is_same = all(other[name] == components[name] for name in ("recipe", "seed"))
        except ArtifactError as error:
            logger.warning("skipping the checkpoints in %s: %s", path.parent, error)
            continue
        if is_same:
            changed = [name for name in components if components[name] != other.get(name)]
            logger.info(
                "starting over: %s changed since the checkpoint %s",
                ", ".join(changed),
                path.parent.name,
            )
