"""One training run from start to finish: build the trainer, resume it, drive it, checkpoint it,
write its artifacts."""

import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.common.artifacts import CURVE, STEPS, TRAIN_ROLLOUTS
from tasks.common.files import sync_folder, write_json
from tasks.common.ledger import Ledger
from tasks.common.progress import progress
from tasks.models.policy import save_policy
from tasks.train.loop.checkpoint import Checkpoints, Snapshot, optimizer_tensors, restore_optimizer
from tasks.train.loop.record import rollout_rows
from tasks.train.loop.trainer import Trainer, TrainingError
from tasks.train.rollouts import Ints, State
from tasks.train.settings import CheckpointSettings

logger = logging.getLogger(__name__)

Record = Callable[[Mapping[str, Any], int, float], None]


def train(
    trainer: Trainer,
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    record: Record,
    chosen: Path | None = None,
) -> dict[str, float]:
    """Drive `trainer` to the end of its plan, from the checkpoint `chosen` or the newest one on.
    Returns the work that kills threw away.

    `record(values, step, charged FLOPs)` is called for every step and every point of the curve.
    KeyboardInterrupt (Ctrl-C, SIGTERM) is raised after the step in flight has been finished and
    checkpointed."""
    ranks = trainer.collector.ranks
    parts = resume(trainer, checkpoints, chosen)
    if len(set(ranks.everyone(trainer.num_steps))) > 1:
        raise TrainingError(
            "the processes of this run found different checkpoints: is the data root shared by all?"
        )
    lost = checkpoints.count_lost(trainer.num_steps) if ranks.is_main else {}
    saved = time.monotonic()
    with stop_requested() as stopping, progress(trainer.num_rollouts(), "train", "rollout") as bar:
        bar.update(int(trainer.ledger.rollouts["generate"]))
        while True:
            note(trainer.validate_if_due(), record)
            started, executed, parts_before = (
                time.perf_counter(),
                trainer.trained("executed"),
                dict(trainer.seconds),
            )
            drawn = None if trainer.is_done() else trainer.sample()
            if drawn is None:
                break
            due = ranks.is_main and time.monotonic() - saved >= settings.every_seconds
            if due:
                rows = rollout_rows(trainer.num_steps, trainer.prompts.ids, drawn[1])
                checkpoints.save_in_flight(TRAIN_ROLLOUTS.frame(rows))
            row = trainer.learn(*drawn)
            stop = any(ranks.everyone(stopping()))
            if ranks.is_main:
                checkpoints.journal(work_of(trainer, row, time.perf_counter() - started, executed))
                if due or stop:
                    parts = save(trainer, checkpoints, parts)
                    saved = time.monotonic()
            seconds = {
                part: spent - parts_before.get(part, 0.0) for part, spent in trainer.seconds.items()
            }
            record(measurements(trainer, row, seconds), row["step"], row["flops_charged"])
            show(row, sum(seconds.values()), bar)
            if stop:
                checkpoints.wait()
                raise KeyboardInterrupt(f"stopped after step {row['step']}, which is checkpointed")
        note(trainer.validate_if_due(last=True), record)
        if ranks.is_main:
            save(trainer, checkpoints, parts)
            checkpoints.wait()
    return lost


def measurements(
    trainer: Trainer, row: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """A step for the record: its row of STEPS, the share of mixed groups, tokens a second, the
    step's own seconds by part, and what control says of itself."""
    parts = {f"seconds/{part}": spent for part, spent in seconds.items() if part != "validate"}
    rates = {
        "mixed_rate": row["num_mixed_groups"] / row["num_prompts"],
        "tokens_per_second": row["completion_tokens_mean"]
        * row["num_rollouts"]
        / max(sum(parts.values()), 1e-9),
    }
    described = trainer.slots.control.describe(trainer.control)
    return {
        **row,
        **rates,
        **parts,
        **{f"control/{name}": value for name, value in described.items()},
    }


def show(row: Mapping[str, Any], seconds: float, bar: Any) -> None:
    """The step on the progress bar, which adds rate and time left."""
    bar.update(row["num_rollouts"])
    tokens = row["completion_tokens_mean"] * row["num_rollouts"] / max(seconds, 1e-9)
    bar.set_postfix_str(
        f"step {row['step']}, reward {row['reward_mean'] or 0:.2f}, "
        f"mixed {row['num_mixed_groups']}/{row['num_prompts']}, {tokens:,.0f} tokens/s, "
        f"{row['flops_charged']:.2g} FLOPs",
        refresh=False,
    )


def note(point: dict[str, Any] | None, record: Record) -> None:
    """Record a new point of the validation curve and log it."""
    if point is not None:
        record({"validation_accuracy": point["accuracy"]}, point["step"], point["flops_charged"])
        logger.info("step %d: validation accuracy %.3f", point["step"], point["accuracy"])


def work_of(
    trainer: Trainer, row: Mapping[str, Any], seconds: float, executed_before: float
) -> dict[str, float]:
    """A journal entry: what the step executed."""
    flops = trainer.trained("executed") - executed_before
    tokens = row["tokens"] - (trainer.steps[-2]["tokens"] if len(trainer.steps) > 1 else 0)
    return {"step": row["step"], "seconds": seconds, "flops": flops, "tokens": tokens}


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Hold back Ctrl-C and SIGTERM until the step is done; a second one ends the run at once."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt(signal.Signals(number).name)
        asked.append(number)
        logger.warning("finishing the step, then a checkpoint (once more to stop at once)")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save(trainer: Trainer, checkpoints: Checkpoints, parts: list[str]) -> list[str]:
    """Checkpoint a copy of the trainer; the rollouts since the last one become a part that is not
    written again."""
    part = None
    if trainer.rollouts:
        first, last = trainer.rollouts[0]["step"], trainer.rollouts[-1]["step"]
        part = (f"rollouts-{first:09d}-{last:09d}.parquet", TRAIN_ROLLOUTS.frame(trainer.rollouts))
        parts, trainer.rollouts = [*parts, part[0]], []
    tensors = optimizer_tensors(trainer.model, trainer.optimizer)
    for slot, arrays in slot_states(trainer).items():
        tensors |= {
            f"{slot}.{name}": torch.from_numpy(np.array(array)) for name, array in arrays.items()
        }
    state = {
        "num_steps": trainer.num_steps,
        "next_validation": trainer.next_validation,
        "ledger": trainer.ledger.as_dict(),
        "seconds": dict(trainer.seconds),
        "parts": parts,
    }
    tables = {"steps": STEPS.frame(trainer.steps), "curve": CURVE.frame(trainer.curve)}
    copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    checkpoints.save(Snapshot(trainer.num_steps, copied, state, tables, part))
    return parts


def slot_states(trainer: Trainer) -> dict[str, State]:
    """What the slots remember, by slot."""
    return {
        "control": trainer.control,
        "generate": trainer.collector.generation,
        "replay": trainer.replay,
    }


def resume(trainer: Trainer, checkpoints: Checkpoints, chosen: Path | None) -> list[str]:
    """Put the trainer where the checkpoint was, if there is one; returns the parts of the rollouts
    it names."""
    loaded = checkpoints.load(chosen)
    trainer.collector.in_flight = checkpoints.in_flight()
    if loaded is None:
        return []
    tensors, state, tables = loaded
    restore_optimizer(trainer.model, trainer.optimizer, tensors)
    for slot, arrays in slot_states(trainer).items():
        arrays.clear()
        saved = {
            k.removeprefix(f"{slot}."): v.numpy()
            for k, v in tensors.items()
            if k.startswith(f"{slot}.")
        }
        arrays.update(saved)
    trainer.num_steps, trainer.next_validation = state["num_steps"], state["next_validation"]
    trainer.ledger = Ledger.from_dict(state["ledger"])
    trainer.seconds.update(state["seconds"])
    trainer.steps, trainer.curve = tables["steps"].to_dicts(), tables["curve"].to_dicts()
    trainer.sync_engine()
    logger.info("resumed after %d steps from %s", trainer.num_steps, checkpoints.folder)
    return list(state["parts"])


def write_results(
    trainer: Trainer, checkpoints: Checkpoints, lost: Mapping[str, float], out: Path
) -> None:
    """Write the run's artifacts from its last checkpoint, then let the checkpoints go."""
    loaded = checkpoints.load()
    if loaded is None:
        raise TrainingError(
            f"{checkpoints.folder} holds no whole checkpoint of the finished run: run it again"
        )
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".policy"
    shutil.rmtree(temporary, ignore_errors=True)
    save_policy(
        trainer.model, trainer.collector.tokenizer, temporary, generation_from=trainer.policy.folder
    )
    shutil.rmtree(out / "policy", ignore_errors=True)
    temporary.rename(out / "policy")
    sync_folder(out)
    STEPS.write(out / "steps.parquet", STEPS.frame(trainer.steps))
    CURVE.write(out / "curve.parquet", CURVE.frame(trainer.curve))
    parts = [pl.read_parquet(checkpoints.folder / name) for name in loaded[1]["parts"]]
    TRAIN_ROLLOUTS.write(out / "rollouts.parquet", pl.concat([TRAIN_ROLLOUTS.frame([]), *parts]))
    write_json(out / "flops.json", trainer.ledger.as_dict())
    seconds = {
        **trainer.seconds,
        "train": sum(v for k, v in trainer.seconds.items() if k != "validate"),
    }
    write_json(
        out / "cost.json",
        {"seconds": {k: round(v, 3) for k, v in sorted(seconds.items())}, "lost": dict(lost)},
    )


def plan_arrays(plan: pl.DataFrame, prompt_ids: list[str]) -> dict[str, Ints]:
    """The plan's columns as arrays, prompts by row; TrainingError names a prompt that is not among
    the prompts."""
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompt_ids)}
    if unknown := set(plan["prompt_id"]) - set(row_of):
        raise TrainingError(
            f"the plan visits prompt {min(unknown)}, which is not among the training prompts"
        )
    if alone := int((plan["group_size"] == 1).sum()):
        logger.warning(
            "%d of %d visits have a group of one: its advantage is 0, it teaches nothing",
            alone,
            len(plan),
        )
    columns = {
        name: plan[name].to_numpy().astype(np.int64) for name in ("group_size", "phase", "pass")
    }
    return {
        **columns,
        "prompt_row": np.array(
            [row_of[prompt_id] for prompt_id in plan["prompt_id"]], dtype=np.int64
        ),
    }
