"""Checkpoints: a killed run goes on where it was, with the same result as if it had not been
killed.

They live in `checkpoints/<key>/` under the data root, where key is the digest of all that the
result depends on: policy, prompts, plan, effective parameters, seed. The same key resumes; another
key is another run and starts from the beginning. A checkpoint is a folder that appears whole
(temporary name, flush, rename) and carries the digests of its files; a damaged one is passed over
for the one before. Tensors are safetensors: nothing here can execute anything."""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file, save_file

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.common.files import (
    ArtifactError,
    digest,
    digest_file,
    follow_folder,
    make_folder,
    make_private_folder,
    read_json,
    replace_file,
    sync_folder,
    write_json,
)

logger = logging.getLogger(__name__)

LOST = ("seconds", "flops", "tokens")
HELD = "held"  # the folder of the trunk's last checkpoint, while a branch runs
LOST_STEP = -1.0  # the journal's entry for what earlier kills lost

Tensors = dict[str, torch.Tensor]
Loaded = tuple[Tensors, dict[str, Any], dict[str, pl.DataFrame]]


@dataclass(frozen=True)
class Snapshot:
    """A copy of all that a run needs to go on after `step` steps. `part` is the name and the table
    of the rollouts since the checkpoint before; `state` names all parts."""

    step: int
    tensors: Tensors
    state: Mapping[str, Any]
    tables: Mapping[str, pl.DataFrame]
    part: tuple[str, pl.DataFrame] | None


class Checkpoints:
    """The checkpoints of one run, its journal of executed work, and the parts of its rollout table.

    Writing happens behind the training: `save` returns at once, `wait` makes sure. Who copies what
    is to be saved waits first, so that two copies never exist.
    """

    def __init__(self, root: Path, components: Mapping[str, Any], keep: int) -> None:
        self.folder, self.keep = root / digest(dict(components)), keep
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        self.part_digests: dict[str, str] = {}
        for deleted in root.glob(".deleted-*"):  # by a run that was killed while it tidied up
            shutil.rmtree(deleted, ignore_errors=True)
        make_private_folder(root)
        if not self.folder.exists():
            log_what_changed(root, components)
            write_json(self.folder / "key.json", components)

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint in the background, the one before being done."""
        self.wait()
        self.writing = self.writer.submit(self.write, snapshot)

    def wait(self) -> None:
        """Return when what was saved is on the disk; raises what went wrong with it."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def write(self, snapshot: Snapshot) -> None:
        """Write the part of the rollouts, then the checkpoint that makes it count, then let the
        oldest ones go."""
        if snapshot.part is not None:
            name, rollouts = snapshot.part
            replace_file(self.folder / name, lambda file: rollouts.write_parquet(file))
            self.part_digests[name] = digest_file(self.folder / name)
        unique = self.unique_name(snapshot.step)
        final, temporary = self.folder / unique, self.folder / f".{unique}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a write that was killed
        make_folder(temporary)
        save_file(snapshot.tensors, temporary / "tensors.safetensors")
        for name, table in snapshot.tables.items():
            table.write_parquet(temporary / f"{name}.parquet")
        files = {path.name: digest_file(path) for path in sorted(temporary.iterdir())}
        for name in files:
            flush(temporary / name)
        parts = {name: self.part_digests[name] for name in snapshot.state["parts"]}
        index = {"files": files, "parts": parts, "state": snapshot.state}
        write_json(temporary / "state.json", {**index, "digest": digest(index)})
        os.rename(temporary, final)
        sync_folder(self.folder)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(old)
        for unfinished in self.folder.glob(".step-*"):
            shutil.rmtree(unfinished)

    def save_in_flight(self, rollouts: pl.DataFrame) -> None:
        """Keep the rollouts of the step in flight: after a kill they are not drawn again."""
        TRAIN_ROLLOUTS.write(self.folder / "in_flight.parquet", rollouts)

    def in_flight(self) -> pl.DataFrame | None:
        """The rollouts of the step that was in flight, if any were kept."""
        path = self.folder / "in_flight.parquet"
        try:
            return TRAIN_ROLLOUTS.read(path) if path.exists() else None
        except ArtifactError as error:
            logger.warning("the rollouts in flight are damaged and will be drawn again: %s", error)
            return None

    def steps(self) -> list[Path]:
        """The folders of complete checkpoints, in the order in which they were written: back from a
        branch, the trunk's steps are lower again."""
        return sorted(self.folder.glob("step-*"), key=sequence)

    def unique_name(self, step: int) -> str:
        """The name of the next checkpoint: its step, and its place in the order of writing."""
        last = max(map(sequence, self.steps()), default=0)
        return f"step-{step:09d}-{last + 1:06d}"

    def hold(self) -> None:
        """Keep the newest checkpoint, the trunk's at a fork, until `end_branch`: a branch needs it
        to go back."""
        self.wait()
        shutil.rmtree(self.folder / HELD, ignore_errors=True)
        temporary = self.folder / ".held"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(self.steps()[-1], temporary / self.steps()[-1].name, copy_function=os.link)
        temporary.rename(self.folder / HELD)
        sync_folder(self.folder)

    def held(self) -> Loaded:
        """What `hold` kept. Raises ArtifactError where it is missing or damaged."""
        self.wait()
        return self.read(held_in(self.folder))

    def end_branch(self, step: int) -> None:
        """Delete what the branch left, now that the trunk at `step` is on the disk: its
        checkpoints, and the journal of its steps, which were not lost. The held checkpoint takes
        its old place, in case the newest is damaged."""
        self.wait()
        for folder in self.steps():
            if branch_of(folder) is not None:
                shutil.rmtree(folder)
        held = held_in(self.folder)
        if (self.folder / held.name).exists():
            shutil.rmtree(held)
        else:
            held.rename(self.folder / held.name)
        shutil.rmtree(self.folder / HELD)
        path = self.folder / "journal.jsonl"
        entries = read_journal(path)
        write_journal(path, [e for e in entries if e["step"] < step or e["step"] == math.inf])
        sync_folder(self.folder)

    def drop_in_flight(self) -> None:
        """Delete the rollouts in flight: the step is another policy's."""
        (self.folder / "in_flight.parquet").unlink(missing_ok=True)

    def load(self, chosen: Path | None = None) -> Loaded | None:
        """The checkpoint `chosen`, or the newest that is whole, or None. A damaged one is named in
        a warning and passed over; ArtifactError when it was chosen, or when `chosen` is another
        run's."""
        if chosen is not None:
            self.check_fit(chosen)
            return self.read(chosen)
        for folder in reversed(self.steps()):
            try:
                return self.read(folder)
            except (
                ArtifactError,
                OSError,
                KeyError,
                TypeError,
                pl.exceptions.PolarsError,
            ) as error:
                logger.warning("passing over the damaged checkpoint %s: %s", folder, error)
        return None

    def branch_from(self, chosen: Path) -> None:
        """Go on from `chosen`, which was loaded: the branch that it leaves is retired.

        Newer checkpoints left here would be what the next restart goes on from, and `keep` would
        let the new branch's go first. They are moved to a folder `retired-...` with the parts of
        rollouts that they name, the rollouts in flight and the journal of their steps. They are
        not deleted: `--resume` of one of them takes a mistake back. A checkpoint of another folder
        is copied here first, and all that is here is retired.
        """
        step = int(read_json(chosen / "state.json")["state"]["num_steps"])
        is_here = chosen.parent.resolve() == self.folder.resolve()
        newer = [path for path in self.steps() if not is_here or sequence(path) > sequence(chosen)]
        retired = self.folder / f"retired-{time.time_ns()}"
        if newer:
            retired.mkdir()
            shutil.copy(self.folder / "key.json", retired)
            self.link_parts(newer, retired)
            self.split_journal(step, retired)
            for name in ("in_flight.parquet", HELD):
                if (self.folder / name).exists():
                    (self.folder / name).rename(retired / name)
        if not is_here:
            self.adopt(chosen, step)
        elif branch_of(chosen) is not None and (retired / HELD).exists():
            # an older checkpoint of the same branch: it needs the trunk's, too
            shutil.copytree(retired / HELD, self.folder / HELD, copy_function=os.link)
        for path in newer:
            path.rename(retired / path.name)
        sync_folder(self.folder)
        if newer:
            logger.warning(
                "going on from %s: the %d checkpoints of the branch that it leaves are now in %s",
                chosen.name,
                len(newer),
                retired,
            )

    def link_parts(self, checkpoints: list[Path], retired: Path) -> None:
        """Give the parts that `checkpoints` need a second name in `retired`. Others may need them
        here; what replaces one here leaves the file under its other name as it was."""
        for name in {name for path in checkpoints for name in read_parts(path)}:
            if (self.folder / name).exists():
                os.link(self.folder / name, retired / name)

    def adopt(self, chosen: Path, step: int) -> None:
        """Copy a checkpoint of another folder, and the parts it needs, into this one."""
        for name in read_parts(chosen):
            shutil.copy(chosen.parent / name, self.folder / f".{name}")
            os.replace(self.folder / f".{name}", self.folder / name)
        if branch_of(chosen) is not None:
            shutil.rmtree(self.folder / HELD, ignore_errors=True)
            shutil.copytree(chosen.parent / HELD, self.folder / HELD)
        unique = self.unique_name(step)
        shutil.rmtree(self.folder / f".{unique}", ignore_errors=True)
        shutil.copytree(chosen, self.folder / f".{unique}")
        os.rename(self.folder / f".{unique}", self.folder / unique)

    def split_journal(self, step: int, retired: Path) -> None:
        """Move what the journal has from `step` on to the folder `retired`: it is neither this
        branch's work nor lost by a kill. What earlier kills lost stays: the journal does not say of
        which branch it was."""
        path = self.folder / "journal.jsonl"
        entries = read_journal(path)
        gone = [entry for entry in entries if step <= entry["step"] < math.inf]
        kept = [entry for entry in entries if not step <= entry["step"] < math.inf]
        write_journal(retired / path.name, gone)
        write_journal(path, kept)

    def read(self, folder: Path) -> Loaded:
        """One checkpoint, the parts it names checked with it; a branch's also for the trunk that it
        goes back to."""
        loaded, parts = read_checkpoint(folder)
        if loaded[1]["branch"] is not None:
            trunk = read_json(held_in(folder.parent) / "state.json")["state"]
            if trunk["num_steps"] != loaded[1]["branch_start"]:
                raise ArtifactError(
                    f"{folder.name} is of a branch that left the trunk after "
                    f"{loaded[1]['branch_start']} steps, and {HELD} holds the trunk after "
                    f"{trunk['num_steps']}"
                )
        self.part_digests = parts
        return loaded

    def check_fit(self, chosen: Path) -> None:
        """Raise ArtifactError, naming what differs, unless `chosen` is a checkpoint of a run like
        this one."""
        mine, theirs = read_json(self.folder / "key.json"), read_json(chosen.parent / "key.json")
        if different := [name for name in mine if mine[name] != theirs.get(name)]:
            raise ArtifactError(
                f"--resume {chosen} does not fit this run: {', '.join(different)} differ. Leave "
                "--resume out to start "
                "over, or set the parameters back"
            )

    def journal(self, entry: Mapping[str, float]) -> None:
        """Note a step's executed work, so that what a kill throws away can be counted."""
        with (self.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def count_lost(self, step: int) -> dict[str, float]:
        """All work of this key that no checkpoint holds: what the journal has from `step` on, and
        what earlier kills lost. The journal is cut back to before `step`."""
        path = self.folder / "journal.jsonl"
        entries = read_journal(path)
        lost = {
            name: sum(entry[name] for entry in entries if entry["step"] >= step) for name in LOST
        }
        kept = [entry for entry in entries if 0 <= entry["step"] < step]
        if any(lost.values()):
            # in the same file, so that a kill cannot count it twice
            kept.append({"step": math.inf, **lost})
        write_journal(path, kept)
        return lost

    def delete(self) -> None:
        """The run has succeeded: nothing is left to resume."""
        deleted = self.folder.with_name(f".deleted-{self.folder.name}")
        os.rename(self.folder, deleted)  # at once: half a folder would be a run that cannot end
        # another run of this data root may be removing it already, as a killed one's
        shutil.rmtree(deleted, ignore_errors=True)


def read_checkpoint(folder: Path) -> tuple[Loaded, dict[str, str]]:
    """A checkpoint's tensors, state and tables, and the digests of the rollout parts beside it;
    ArtifactError when a file is not what was written."""
    index = read_json(folder / "state.json")
    if digest({name: index[name] for name in ("files", "parts", "state")}) != index["digest"]:
        raise ArtifactError("state.json is not what was written")
    expected = {folder / name: value for name, value in index["files"].items()}
    is_held = folder.parent.name == HELD
    beside = folder.parent.parent if is_held else folder.parent
    expected |= {beside / name: value for name, value in index["parts"].items()}
    for path, value in expected.items():
        if digest_file(path) != value:
            raise ArtifactError(f"{path.name} is not what was written")
    tables = {path.stem: pl.read_parquet(path) for path in folder.glob("*.parquet")}
    return (load_file(folder / "tensors.safetensors"), index["state"], tables), index["parts"]


def read_journal(path: Path) -> list[dict[str, float]]:
    """The entries of a journal. A line cut short by a kill, or damaged, is left out: it only counts
    costs."""
    entries = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            entries.append({name: float(entry[name]) for name in ("step", *LOST)})
        except (ValueError, KeyError, TypeError):
            logger.warning("passing over a damaged line of %s", path)
    return [
        {**entry, "step": math.inf if entry["step"] == LOST_STEP else entry["step"]}
        for entry in entries
    ]


def write_journal(path: Path, entries: list[dict[str, float]]) -> None:
    """The inverse of `read_journal`."""
    lines = [
        {**entry, "step": LOST_STEP if entry["step"] == math.inf else entry["step"]}
        for entry in entries
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    replace_file(path, lambda file: file.write(text.encode()))


def held_in(folder: Path) -> Path:
    """The checkpoint that is held in a folder of checkpoints; ArtifactError where there is none."""
    found = list((folder / HELD).glob("step-*"))
    if not found:
        raise ArtifactError(f"{folder / HELD} is missing, the trunk that a branch goes back to")
    return found[0]


def branch_of(folder: Path) -> float | None:
    """The branch that a checkpoint is of; None for the trunk's, and for a damaged one."""
    try:
        branch: float | None = read_json(folder / "state.json")["state"]["branch"]
    except (ArtifactError, KeyError, TypeError):
        return None
    return branch


def sequence(folder: Path) -> int:
    """A checkpoint's place in the order of writing."""
    return int(folder.name.rpartition("-")[2])


def read_parts(folder: Path) -> list[str]:
    """The names of the parts that a checkpoint needs; none where it is too damaged to say."""
    try:
        return list(read_json(folder / "state.json")["parts"])
    except (ArtifactError, KeyError, TypeError):
        return []


def flush(path: Path) -> None:
    """Flush a written file to the disk, its mode that of the folder."""
    follow_folder(path, 0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def log_what_changed(root: Path, components: Mapping[str, Any]) -> None:
    """Say why a fresh start is one, when another checkpoint of the same recipe and seed is
    there."""
    for path in sorted(root.glob("*/key.json")):
        other = read_json(path)
        if (other["recipe"], other["seed"]) == (components["recipe"], components["seed"]):
            changed = [name for name in components if components[name] != other.get(name)]
            logger.info(
                "starting over: %s changed since the checkpoint %s",
                ", ".join(changed),
                path.parent.name,
            )


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The policy's and AdamW's tensors under names that say whose they are."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"policy.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors
) -> None:
    """The inverse of `optimizer_tensors`, in place."""
    optimizer.state.clear()  # what it has, and the checkpoint has not, is of another run
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"policy.{name}"])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in tensors:
                    optimizer.state[parameter][key] = tensors[f"{key}.{name}"].to(
                        "cpu"
                        if key == "step" and not optimizer.defaults.get("fused")
                        else parameter.device
                    )
