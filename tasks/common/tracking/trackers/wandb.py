"""Weights & Biases. Runs are offline by default (WANDB_MODE); `wandb sync` uploads them later."""

import os

from tasks.common.tracking.trackers import PROJECT, MirrorRun, Point, with_gflops

ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


class Client:
    def __init__(self, run: MirrorRun) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import wandb

        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, x_disable_stats=True
        )
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            group=run.group,
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            resume="allow",
            settings=settings,
        )
        if run.params:
            self.run.config.update(run.params, allow_val_change=True)

    def points(self, points: list[Point]) -> None:
        """Log the points. After a kill, training repeats steps unchanged; wandb ignores steps that
        the run already has."""
        for one in points:
            self.run.log(with_gflops(one), step=one["step"])

    def final(self, values: dict[str, float]) -> None:
        self.run.summary.update(values)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
