"""Checkpoints: a killed run goes on where it was, with the same result as if it had not been killed.

They live in `checkpoints/<key>/` under the data root, where key is the digest of all that the result depends on:
policy, prompts, plan, effective parameters, seed. The same key resumes; another key is another run and starts afresh.
A checkpoint is a folder that appears whole (temporary name, flush, rename) and carries the digests of its files; a
damaged one is passed over for the one before. Tensors are safetensors: nothing here can execute anything.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file, save_file

from tasks.common.files import ArtifactError, digest, digest_file, read_json, replace_file, sync_folder, write_json

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Loaded = tuple[Tensors, dict[str, Any], dict[str, pl.DataFrame]]


@dataclass(frozen=True)
class Snapshot:
    """A copy of all that a run needs to go on after `step` steps. `part` is the name and the table of the rollouts
    since the checkpoint before; `state` names all parts."""

    step: int
    tensors: Tensors
    state: Mapping[str, Any]
    tables: Mapping[str, pl.DataFrame]
    part: tuple[str, pl.DataFrame] | None


class Checkpoints:
    """The checkpoints of one run, its journal of executed work, and the parts of its rollout table.

    Writing happens behind the training: `save` copies and returns, `wait` makes sure.
    """

    def __init__(self, root: Path, components: Mapping[str, Any], keep: int) -> None:
        self.folder, self.keep = root / digest(dict(components)), keep
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        if not self.folder.exists():
            log_what_changed(root, components)
            write_json(self.folder / "key.json", components)

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint in the background; if the one before is not done yet, wait for it first."""
        self.wait()
        self.writing = self.writer.submit(self.write, snapshot)

    def wait(self) -> None:
        """Return when what was saved is on the disk; raises what went wrong with it."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def write(self, snapshot: Snapshot) -> None:
        """Write the part of the rollouts, then the checkpoint that makes it count, then let the oldest ones go."""
        if snapshot.part is not None:
            name, rollouts = snapshot.part
            replace_file(self.folder / name, lambda file: rollouts.write_parquet(file))
        final, temporary = self.folder / f"step-{snapshot.step:09d}", self.folder / f".step-{snapshot.step:09d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(snapshot.tensors, temporary / "tensors.safetensors")
        for name, table in snapshot.tables.items():
            table.write_parquet(temporary / f"{name}.parquet")
        files = {path.name: digest_file(path) for path in sorted(temporary.iterdir())}
        for name in files:
            flush(temporary / name)
        state = {"files": files, "state": snapshot.state, "digest": digest(snapshot.state)}
        write_json(temporary / "state.json", state)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        sync_folder(self.folder)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(old)

    def save_in_flight(self, rollouts: pl.DataFrame) -> None:
        """Keep the rollouts of the step in flight: after a kill they are not drawn again."""
        replace_file(self.folder / "in_flight.parquet", lambda file: rollouts.write_parquet(file))

    def in_flight(self) -> pl.DataFrame | None:
        """The rollouts of the step that was in flight, if any were kept."""
        path = self.folder / "in_flight.parquet"
        return pl.read_parquet(path) if path.exists() else None

    def steps(self) -> list[Path]:
        """The folders of complete checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def load(self, chosen: Path | None = None) -> Loaded | None:
        """The checkpoint `chosen`, or the newest that is whole, or None. A damaged one is named in a warning and
        passed over; ArtifactError when it was chosen, or when `chosen` is another run's."""
        if chosen is not None:
            self.check_fit(chosen)
            return read_checkpoint(chosen)
        for folder in reversed(self.steps()):
            try:
                return read_checkpoint(folder)
            except (ArtifactError, OSError, KeyError, pl.exceptions.PolarsError) as error:
                logger.warning("passing over the damaged checkpoint %s: %s", folder, error)
        return None

    def check_fit(self, chosen: Path) -> None:
        """Raise ArtifactError, naming what differs, unless `chosen` is a checkpoint of a run like this one."""
        mine, theirs = read_json(self.folder / "key.json"), read_json(chosen.parent / "key.json")
        if different := [name for name in mine if mine[name] != theirs.get(name)]:
            raise ArtifactError(
                f"--resume {chosen} does not fit this run: {', '.join(different)} differ. Leave --resume out to start "
                "afresh, or set the parameters back"
            )

    def journal(self, entry: Mapping[str, float]) -> None:
        """Note a step's executed work, so that what a kill throws away can be counted."""
        with (self.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def count_lost(self, step: int) -> dict[str, float]:
        """All work of this key that no checkpoint holds: what the journal has from `step` on, and what earlier kills
        lost. The journal is cut back to before `step`."""
        lost = {"seconds": 0.0, "flops": 0.0, "tokens": 0.0}
        if (self.folder / "lost.json").exists():
            lost |= read_json(self.folder / "lost.json")
        entries = read_journal(self.folder / "journal.jsonl")
        for entry in entries:
            if entry["step"] >= step:
                lost = {name: total + entry[name] for name, total in lost.items()}
        write_json(self.folder / "lost.json", lost)
        kept = "".join(json.dumps(entry) + "\n" for entry in entries if entry["step"] < step)
        (self.folder / "journal.jsonl").write_text(kept)
        return lost

    def delete(self) -> None:
        """The run has succeeded: nothing is left to resume."""
        shutil.rmtree(self.folder)


def read_checkpoint(folder: Path) -> Loaded:
    """A checkpoint's tensors, state and tables; ArtifactError when a file is not what was written."""
    index = read_json(folder / "state.json")
    for name, expected in index["files"].items():
        if digest_file(folder / name) != expected:
            raise ArtifactError(f"{name} is not what was written")
    if digest(index["state"]) != index["digest"]:
        raise ArtifactError("state.json is not what was written")
    tables = {path.stem: pl.read_parquet(path) for path in folder.glob("*.parquet")}
    return load_file(folder / "tensors.safetensors"), index["state"], tables


def read_journal(path: Path) -> list[dict[str, float]]:
    """The entries of a journal; a last line cut short by a kill is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def flush(path: Path) -> None:
    """Flush a written file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def log_what_changed(root: Path, components: Mapping[str, Any]) -> None:
    """Say why a fresh start is one, when another checkpoint of the same recipe and seed is there."""
    for path in sorted(root.glob("*/key.json")):
        other = read_json(path)
        if (other["recipe"], other["seed"]) == (components["recipe"], components["seed"]):
            changed = [name for name in components if components[name] != other.get(name)]
            logger.info("starting afresh: %s changed since the checkpoint %s", ", ".join(changed), path.parent.name)


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The policy's and AdamW's tensors under names that say whose they are."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"policy.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors


def restore_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """The inverse of `optimizer_tensors`, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"policy.{name}"])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in tensors:
                    optimizer.state[parameter][key] = tensors[f"{key}.{name}"].to(
                        "cpu" if key == "step" and not optimizer.defaults.get("fused") else parameter.device
                    )
