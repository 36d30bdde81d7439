"""Winnow's side of a comparison, `grpo` or `winnow`: a timed run of its loop (`tasks.train.loop`)
over the plan of a world."""

import dataclasses
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.models.policy import save_trained
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.loop.loop import train
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings
from tests.bench.clock import Clock, Job, children_megabytes, peak_megabytes
from tests.bench.world import RECIPES
from tests.train.worlds import make_trainer


def bench_trainer(root: Path, seed: int, side: str = "grpo", **changes: Any) -> Trainer:
    """Return the trainer of the world under `root`, with `changes` to the section `train`."""
    recipe = RECIPES[side]
    own = params.load(root / "params.yaml")["recipes"][recipe]["train"]
    trainer = make_trainer(Layout(root), recipe, seed, **own, **changes)
    # training validates at start and end, at any interval: reduce it to one prompt
    held_out = trainer.validation
    trainer.validation = dataclasses.replace(held_out, table=held_out.table.head(1))
    return trainer


def measure(job: Job) -> dict[str, Any]:
    """Train, save the policy at the points as `job.out` with the number of the step, and return the
    measurements."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"max_steps": job.steps}
    if job.learning_rate:
        changes["learning_rate"] = job.learning_rate
    trainer = bench_trainer(job.root, job.seed, job.side, **changes)
    saved = []
    settings = params.section(
        params.load(job.root / "params.yaml"), "checkpoint", CheckpointSettings
    )
    key = {"recipe": job.side, "seed": job.seed, "learning_rate": job.learning_rate}
    checkpoints = Checkpoints(Layout(job.root).checkpoints, key, settings.keep)
    trainer.add_point(0.0)
    with closing(trainer.collector.grader):
        trainer.collector.grader.grader.started(set(trainer.prompts.table["verifier"]))
        clock = Clock()

        def record(values: Any, step: int, flops: float) -> None:
            """Record the end of a step; save the policy at the points of later evaluation."""
            if "reward_mean" not in values:
                return
            clock.tick(trainer.state.seconds["generate"])
            num_steps = trainer.state.num_steps
            if num_steps in job.points:
                folder = job.out.with_name(f"{job.out.name}-{num_steps}")
                with clock.paused():
                    save_trained(trainer.learner.model, trainer.run.policy.folder, folder)
                saved.append({"step": num_steps, "seconds": clock.wall[-1], "folder": str(folder)})

        train(trainer, checkpoints, settings, record)
        memory = {"peak_mb": peak_megabytes(), "children_mb": children_megabytes()}
    rows = trainer.state.steps
    return {
        "wall": clock.wall,
        "cpu": clock.cpu,
        "generation": clock.generation,
        **memory,
        "completion_tokens": [row["completion_tokens_mean"] * row["num_rollouts"] for row in rows],
        "points": saved,
    }
