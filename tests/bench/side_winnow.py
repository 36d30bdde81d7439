"""Winnow's side of a comparison, `grpo` or `winnow`: a timed run of its loop (`tasks.train.loop`)
over the plan of a world.

python -m tests.bench.side_winnow ROOT --steps N --seed S --points N/4 N/2 ... --out FILE"""

import dataclasses
import json
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
from tests.bench.clock import Clock, children_megabytes, peak_megabytes
from tests.bench.world import RECIPES, side_options
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


def main() -> None:
    logging.disable(logging.WARNING)
    options = side_options(__doc__)
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"max_steps": options.steps}
    if options.learning_rate:
        changes["learning_rate"] = options.learning_rate
    trainer = bench_trainer(options.root, options.seed, options.side, **changes)
    points = []
    settings = params.section(
        params.load(options.root / "params.yaml"), "checkpoint", CheckpointSettings
    )
    checkpoints = Checkpoints(
        Layout(options.root).checkpoints,
        {"recipe": options.side, "seed": options.seed, "learning_rate": options.learning_rate},
        settings.keep,
    )
    trainer.add_point(0.0)
    with closing(trainer.collector.grader):
        trainer.collector.grader.grader.started(set(trainer.prompts.table["verifier"]))
        clock = Clock()

        def record(values: Any, step: int, flops: float) -> None:
            """Record the end of a step; save the policy at the points of later evaluation."""
            if "reward_mean" not in values:
                return
            clock.tick()
            if trainer.state.num_steps in options.points:
                folder = options.out.parent / f"{options.out.stem}-{trainer.state.num_steps}"
                with clock.paused():
                    save_trained(trainer.learner.model, trainer.run.policy.folder, folder)
                points.append(
                    {
                        "step": trainer.state.num_steps,
                        "seconds": clock.wall[-1],
                        "folder": str(folder),
                    }
                )

        train(trainer, checkpoints, settings, record)
        memory = {"peak_mb": peak_megabytes(), "children_mb": children_megabytes()}
    rows = trainer.state.steps
    report = {
        "wall": clock.wall,
        "cpu": clock.cpu,
        **memory,
        "completion_tokens": [row["completion_tokens_mean"] * row["num_rollouts"] for row in rows],
        "points": points,
    }
    options.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
