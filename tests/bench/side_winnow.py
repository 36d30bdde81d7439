"""Winnow's side of a comparison: its own training loop (`tasks.train.loop.run.train`) over the plan
of a world, timed.

python -m tests.bench.side_winnow ROOT --steps N --seed S --points N/4 N/2 ... --out FILE
"""

import argparse
import dataclasses
import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tasks.common import params, stage, tracking
from tasks.common.artifacts import PLAN, Layout
from tasks.engines.engine import EngineSettings, Sampling
from tasks.grading.grader import Grader, Verify
from tasks.models.policy import read_policy, save_policy
from tasks.train.__main__ import build
from tasks.train.learner.ranks import Ranks
from tasks.train.loop.checkpoint import Checkpoints
from tasks.train.loop.run import train
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings, TrainSettings
from tests.bench.clock import Clock, children_megabytes, peak_megabytes, seconds_since_start
from tests.bench.world import RECIPE, side_options


def make_trainer(root: Path, seed: int, **changes: Any) -> Trainer:
    """The trainer of the world under `root`; `changes` to the section `train`, or to `engine` by
    `max_rows`."""
    layout, values = Layout(root), params.load(root / "params.yaml")
    engine = dataclasses.replace(
        params.section(values, "engine", EngineSettings),
        **{name: changes.pop(name) for name in ("max_rows",) if name in changes},
    )
    settings = dataclasses.replace(params.parse(values["train"], TrainSettings, "train"), **changes)
    run = stage.Stage(
        "bench", values, layout, RECIPE, seed, argparse.Namespace(), tracking.Tracker()
    )
    trainer = build(
        run,
        read_policy(layout),
        settings,
        params.section(values, "sampling", Sampling),
        engine,
        Grader(params.section(values, "verify", Verify)),
        Ranks(0, 1),
        seed,
        PLAN.read(layout.recipe(RECIPE) / "plan.parquet"),
    )
    held_out = (
        trainer.validation
    )  # training validates at its start and end, whatever the interval: make it one prompt
    trainer.validation = dataclasses.replace(
        held_out, **{f.name: getattr(held_out, f.name)[:1] for f in dataclasses.fields(held_out)}
    )
    return trainer


def main() -> None:
    logging.disable(logging.WARNING)
    options = side_options(__doc__)
    torch.set_num_threads(1)
    trainer = make_trainer(options.root, options.seed)
    ready, points = seconds_since_start(), []
    settings = params.section(
        params.load(options.root / "params.yaml"), "checkpoint", CheckpointSettings
    )
    checkpoints = Checkpoints(
        Layout(options.root).checkpoints, {"recipe": RECIPE, "seed": options.seed}, settings.keep
    )
    trainer.settings = dataclasses.replace(trainer.settings, max_steps=options.steps)
    trainer.validate_if_due()
    with closing(trainer.collector.grader):
        trainer.collector.grader.started(set(trainer.prompts.verifiers))
        clock = Clock()

        def record(values: Any, step: int, flops: float) -> None:
            """A step has ended: note when; keep the policy at the points that are evaluated
            later."""
            if "reward_mean" not in values:
                return
            clock.tick()
            if trainer.num_steps in options.points:
                folder = options.out.parent / f"winnow-{options.seed}-{trainer.num_steps}"
                with clock.paused():
                    save_policy(
                        trainer.model,
                        trainer.collector.tokenizer,
                        folder,
                        generation_from=trainer.policy.folder,
                    )
                points.append(
                    {"step": trainer.num_steps, "seconds": clock.wall[-1], "folder": str(folder)}
                )

        train(trainer, checkpoints, settings, record)
        memory = {"peak_mb": peak_megabytes(), "children_mb": children_megabytes()}
    rows = trainer.steps
    report = {
        "start_seconds": ready,
        "wall": clock.wall,
        "cpu": clock.cpu,
        **memory,
        "rewards": [row["reward_mean"] for row in rows],
        "completion_tokens": [row["completion_tokens_mean"] * row["num_rollouts"] for row in rows],
        "points": points,
    }
    options.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
