"""The stage `train`: from the initial policy, the prompts and the plan to a trained policy."""

from tasks.common import registry, stage
from tasks.train import trainers
from tasks.train.loading import train_settings


def main(run: stage.Stage) -> None:
    """Train a cell with the trainer of its recipe."""
    settings = train_settings(run.params, run.coordinates()[0])
    registry.load(trainers, settings.trainer, "train.trainer").main(run, settings)
