"""Save a trainer to a checkpoint, restore it, and write the artifacts of a finished run."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import torch

from tasks.common.artifacts import CURVE, STEPS, TRAIN_ROLLOUTS
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError, digest_file, sync_folder, writing
from tasks.common.recipes import runs_of
from tasks.models.folder import policy_digest
from tasks.models.lora import save_adapter
from tasks.models.policy import save_trained
from tasks.models.sharding import local, local_rows
from tasks.train.checkpoint.checkpoints import Checkpoints, Snapshot
from tasks.train.checkpoint.folder import Loaded
from tasks.train.checkpoint.tensors import optimizer_tensors, restore_optimizer, rows_like
from tasks.train.data.columns import COLUMNS
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

METHOD = "method"  # prefix of the slot and field names of a checkpoint's tensors
QUEUE = "queue"  # name of the queue's table and numbers in a checkpoint
OF_MACHINE = ("code", "inputs")  # components that name files of this machine, or that code changes


def save(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """Checkpoint a copy of the trainer. The rollouts since the last checkpoint become a separate
    part, which is written once. Every rank calls this; only rank 0 writes if the policy is
    unsharded."""
    checkpoints.wait()  # before the next copy: two may not fit in main memory
    tensors = optimizer_tensors(trainer.learner.model, trainer.learner.optimizer)
    tensors |= trainer.learner.reference_tensors() | trainer.learner.proximal.tensors()
    shards = write_shards(trainer, checkpoints, tensors)
    if not trainer.run.ranks.is_main:
        return
    state, learner, part = trainer.state, trainer.learner, None
    if state.rollouts:
        part, state.rollouts = pl.concat(state.rollouts, rechunk=True), []
    tensors = {name: tensor for name, tensor in tensors.items() if local_rows(tensor) is None}
    states, queue, table = trainer.queue.snapshot()
    tables = {
        "steps": STEPS.frame(state.steps),
        "curve": CURVE.frame(state.curve),
        QUEUE: table,
    }
    for name, value in states.items():
        if isinstance(value, pl.DataFrame):
            tables[f"{METHOD}.{name}"] = value
        else:
            tensors[f"{METHOD}.{name}"] = torch.from_numpy(value)
    copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    numbers = {**state.numbers(), "version": learner.version, QUEUE: queue}
    numbers["budget"] = None if trainer.budget is None else trainer.budget.numbers()
    numbers["proximal"] = learner.proximal.numbers()
    checkpoints.save(Snapshot(state.num_steps, copied, shards, numbers, tables, part))


def write_shards(
    trainer: Trainer, checkpoints: Checkpoints, tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Write every rank's rows of the sharded tensors; return the names and digests of the files.
    They move into the checkpoint when all are on disk."""
    ranks = trainer.run.ranks
    rows = {
        name: local(tensor).cpu().contiguous()
        for name, tensor in tensors.items()
        if local_rows(tensor) is not None
    }
    if not rows:
        return {}
    if ranks.is_main:
        checkpoints.clear_shards()
    ranks.barrier()
    size = ranks.size // trainer.learner.memory.replicas  # the first replica's ranks write
    written = checkpoints.write_shard(ranks.rank, size, rows) if ranks.rank < size else None
    return dict(each for each in ranks.all_gather(written) if each is not None)


def resume(trainer: Trainer, checkpoints: Checkpoints, checkpoint: Path | None) -> None:
    """Restore the trainer from `checkpoint` or the newest checkpoint, if there is one."""
    loaded = checkpoints.load(checkpoint)
    if loaded is not None and (what := unreadable_part(trainer, loaded)):
        raise ArtifactError(
            f"{checkpoint or checkpoints.folder} is from other code, which stored {what} "
            "differently: omit --resume, or delete this folder, to start over"
        )
    num_steps = None if loaded is None else loaded[1]["num_steps"]
    if len(set(trainer.run.ranks.all_gather(num_steps))) > 1:
        raise TrainingError(
            "the processes of this run found different checkpoints: is the data root shared by all?"
        )
    if checkpoint is not None and trainer.run.ranks.is_main:
        checkpoints.branch_from(checkpoint)
    trainer.run.ranks.barrier()  # other ranks must not read the folder meanwhile
    if loaded is not None:
        restore(trainer, loaded)
        logger.info("resumed after %d steps from %s", trainer.state.num_steps, checkpoints.folder)


def unreadable_part(trainer: Trainer, loaded: Loaded) -> str | None:
    """Return a name for the part of the checkpoint that this code cannot read, or None."""
    tensors, numbers, tables = loaded
    if QUEUE not in numbers or not {*COLUMNS} <= {*tables[QUEUE].columns}:
        return "rollouts"
    names = [f"{METHOD}.{name}" for name in trainer.slots.states()]
    missing = [name for name in names if name not in tensors and name not in tables]
    return f"the state of methods ({', '.join(missing)})" if missing else None


def restore(trainer: Trainer, loaded: Loaded) -> None:
    """Restore the trainer from a checkpoint."""
    tensors, numbers, tables = loaded
    restore_optimizer(trainer.learner.model, trainer.learner.optimizer, tensors)
    trainer.learner.proximal.restore(**numbers.get("proximal", {"versions": [], "weight": 1.0}))
    others = trainer.learner.reference_tensors() | trainer.learner.proximal.tensors()
    for name, tensor in others.items():
        local(tensor).copy_(rows_like(tensor, tensors, name))
    states: dict[str, Any] = {}
    for name in trainer.slots.states():
        key = f"{METHOD}.{name}"
        states[name] = tables[key] if key in tables else tensors[key].numpy()
    trainer.slots.restore(states)
    trainer.learner.version = numbers["version"]
    trainer.state.num_steps = numbers["num_steps"]
    trainer.weights.load()
    # after the engine's probe, which an uninterrupted run would not have made
    trainer.state.restore(numbers, tables["steps"].to_dicts(), tables["curve"].to_dicts())
    trainer.queue.restore(numbers[QUEUE], tables[QUEUE])
    if trainer.budget is not None:
        trainer.budget.restore(numbers["budget"])


def write_results(trainer: Trainer, checkpoints: Checkpoints, out: Path) -> None:
    """Write the run's artifacts, with rollouts from its last checkpoint. Raise TrainingError if the
    checkpoint is not intact. Every rank calls this, as a sharded policy is gathered from all."""
    model, adapter = trainer.learner.whole_model(), trainer.learner.adapter()
    if model is None or not trainer.run.ranks.is_main:
        return
    loaded, state = checkpoints.load(), trainer.state
    if loaded is None or loaded[1]["num_steps"] != state.num_steps:
        raise TrainingError(
            f"{checkpoints.folder} has no intact checkpoint of the finished run: run the same "
            "command again to repeat the lost steps"
        )
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".policy"
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(out / "policy"):
        save_trained(model, trainer.run.policy.folder, temporary)
        if adapter:
            save_adapter(trainer.learner.model, adapter, temporary / "adapter")
    shutil.rmtree(out / "policy", ignore_errors=True)
    temporary.rename(out / "policy")
    sync_folder(out)
    trained = policy_digest(out / "policy")
    write_checked(out / "policy.json", {"digest": trained})
    made = {key: value for key, value in checkpoints.components.items() if key not in OF_MACHINE}
    write_checked(out / "settings.json", {**made, "trained": trained})
    STEPS.write(out / "steps.parquet", STEPS.frame(state.steps))
    CURVE.write(out / "curve.parquet", CURVE.frame(state.curve))
    TRAIN_ROLLOUTS.write_parts(out / "rollouts.parquet", checkpoints.rollouts())
    flops: dict[str, Any] = state.ledger.as_dict()
    if folders := runs_of(asdict(trainer.run.settings)):
        flops["not_charged"] = [str(folder) for folder in folders]  # generated by other runs
    if (budget := trainer.budget) is not None:
        flops["budget"] = {**asdict(budget.cell), "spent": budget.spent}
    write_checked(out / "flops.json", flops)


def write_measured(
    seconds: Mapping[str, float], lost: Mapping[str, float], path: Path, out: Path
) -> None:
    """Write the run's seconds and lost work to `path`, with a digest of the curve in `out`."""
    rounded = {part: round(spent, 3) for part, spent in sorted(seconds.items())}
    of = digest_file(out / "curve.parquet")
    write_checked(path, {"of": of, "seconds": rounded, "lost": dict(lost)})
