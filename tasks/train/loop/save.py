"""A trainer to a checkpoint and back, and from its last checkpoint to the run's artifacts."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import polars as pl
import torch

from tasks.common.artifacts import CURVE, STEPS, TRAIN_ROLLOUTS
from tasks.common.files import ArtifactError, sync_folder, writing
from tasks.common.sealed import write_sealed
from tasks.models.folder import policy_digest
from tasks.models.policy import save_policy
from tasks.train.checkpoint.checkpoints import Checkpoints, Snapshot
from tasks.train.checkpoint.stored import Loaded
from tasks.train.checkpoint.tensors import optimizer_tensors, restore_optimizer
from tasks.train.learner.lora import save_adapter
from tasks.train.learner.sharding import local, local_rows
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.groups import table_of

logger = logging.getLogger(__name__)

METHOD = "method"  # before the slot's name and the field's, in the names of a checkpoint's tensors
BUFFER = "buffer"  # the name of its table and its numbers in a checkpoint


def save(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """Checkpoint a copy of the trainer; the rollouts since the last one become a part of their own,
    which is not written again. Every rank calls this; those of a policy that is not sharded have
    nothing to add to the first."""
    checkpoints.wait()  # before the copy is made: two of them may be more than main memory holds
    tensors = optimizer_tensors(trainer.learner.model, trainer.learner.optimizer)
    shards = write_shards(trainer, checkpoints, tensors)
    if not trainer.run.ranks.is_main:
        return
    state, learner, part = trainer.state, trainer.learner, None
    if state.rollouts:
        part, state.rollouts = TRAIN_ROLLOUTS.frame(state.rollouts), []
    tensors = {name: tensor for name, tensor in tensors.items() if local_rows(tensor) is None}
    with trainer.buffer.lock:
        states, buffer = trainer.slots.states(), trainer.buffer.numbers()
        groups = trainer.buffer.groups()
    for slot, arrays in states.items():
        tensors |= {f"{METHOD}.{slot}.{k}": torch.from_numpy(v) for k, v in arrays.items()}
    tables = {
        "steps": STEPS.frame(state.steps),
        "curve": CURVE.frame(state.curve),
        BUFFER: table_of(groups),
    }
    copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    numbers = {**state.numbers(), "version": learner.version, BUFFER: buffer}
    checkpoints.save(Snapshot(state.num_steps, copied, shards, numbers, tables, part))


def write_shards(
    trainer: Trainer, checkpoints: Checkpoints, tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Have every rank write its rows of the sharded tensors; the names and digests of the files. A
    checkpoint takes them over when all are on the disk."""
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
    return dict(ranks.all_gather(checkpoints.write_shard(ranks.rank, ranks.size, rows)))


def resume(trainer: Trainer, checkpoints: Checkpoints, chosen: Path | None) -> None:
    """Put the trainer where `chosen` or the newest checkpoint was made, if there is one."""
    loaded = checkpoints.load(chosen)
    if loaded is not None and BUFFER not in loaded[1] and trainer.run.settings.max_staleness:
        why = "is of an earlier version, which kept what was sampled ahead in another form"
        if chosen is not None:
            raise ArtifactError(f"--resume {chosen} {why}: leave --resume out to start over")
        logger.warning("starting over: the newest checkpoint of %s %s", checkpoints.folder, why)
        checkpoints.parts, loaded = [], None
    found = None if loaded is None else loaded[1]["num_steps"]
    if len(set(trainer.run.ranks.all_gather(found))) > 1:
        raise TrainingError(
            "the processes of this run found different checkpoints: is the data root shared by all?"
        )
    if chosen is not None and trainer.run.ranks.is_main:
        checkpoints.branch_from(chosen)
    trainer.run.ranks.barrier()  # the others must not find what is being retired
    if loaded is not None:
        restore(trainer, loaded)
        logger.info("resumed after %d steps from %s", trainer.state.num_steps, checkpoints.folder)


def restore(trainer: Trainer, loaded: Loaded) -> None:
    """Put the trainer where a checkpoint was made."""
    tensors, numbers, tables = loaded
    restore_optimizer(trainer.learner.model, trainer.learner.optimizer, tensors)
    trainer.slots.restore(
        {
            slot: {
                name.removeprefix(f"{METHOD}.{slot}."): tensor.numpy()
                for name, tensor in tensors.items()
                if name.startswith(f"{METHOD}.{slot}.")
            }
            for slot in trainer.slots.states()
        }
    )
    trainer.learner.version = numbers["version"]
    trainer.state.num_steps = numbers["num_steps"]
    trainer.sync_engine()
    # after the engine's probe, which a run that was not stopped would not have made
    trainer.state.fill(numbers, tables["steps"].to_dicts(), tables["curve"].to_dicts())
    empty = {  # a step's own batch was not kept before
        "progress": trainer.slots.control.progress(),
        "spending": None,
        "num_asked": numbers["num_steps"],
        "num_complete": 0,
        "num_unobserved": 0,
        "replayed": [],
        "batches": [],
    }
    trainer.buffer.restore(numbers.get(BUFFER, empty), tables.get(BUFFER, table_of([])))


def write_results(
    trainer: Trainer, checkpoints: Checkpoints, lost: Mapping[str, float], out: Path
) -> None:
    """Write the run's artifacts from its last checkpoint. Every rank calls this: a sharded policy
    is put together from all."""
    model, adapter = trainer.learner.whole_model(), trainer.learner.adapter()
    if model is None or not trainer.run.ranks.is_main:
        return
    loaded, state = checkpoints.load(), trainer.state
    if loaded is None or loaded[1]["num_steps"] != state.num_steps:
        raise TrainingError(
            f"{checkpoints.folder} holds no whole checkpoint of the finished run: run the same "
            "command again, which makes the steps that are lost again"
        )
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".policy"
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(out / "policy"):
        save_policy(
            model,
            trainer.collector.tokenizer,
            temporary,
            generation_from=trainer.run.policy.folder,
        )
        if adapter:
            save_adapter(trainer.learner.model, adapter, temporary / "adapter")
    shutil.rmtree(out / "policy", ignore_errors=True)
    temporary.rename(out / "policy")
    sync_folder(out)
    write_sealed(out / "policy.json", {"digest": policy_digest(out / "policy")})
    STEPS.write(out / "steps.parquet", STEPS.frame(state.steps))
    CURVE.write(out / "curve.parquet", CURVE.frame(state.curve))
    parts = [pl.read_parquet(checkpoints.folder / name) for name in checkpoints.parts]
    TRAIN_ROLLOUTS.write(out / "rollouts.parquet", pl.concat([TRAIN_ROLLOUTS.frame([]), *parts]))
    flops = state.ledger.as_dict()
    if (spending := trainer.buffer.spending) is not None:
        flops["budget"] = {**asdict(spending.budget), "spent": trainer.buffer.spent}
    write_sealed(out / "flops.json", flops)
    seconds = {**state.seconds, "train": trainer.spent_seconds("validate", "branch")}
    rounded = {part: round(spent, 3) for part, spent in sorted(seconds.items())}
    write_sealed(out / "cost.json", {"seconds": rounded, "lost": dict(lost)})
