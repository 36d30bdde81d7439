"""The record of what ran, in MLflow. The only file that imports mlflow.

A parent run per pipeline, a child per stage that ran. Tracking never decides anything and never stops a stage.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.artifacts import Layout


@dataclass(frozen=True)
class Tracking:
    """The section `tracking`: where the record goes."""

    uri: str | None
    experiment: str
    log_weights: bool


class Tracker:
    """What a stage says about itself while it runs."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters, nested ones flattened with dots."""

    def metrics(self, values: Mapping[str, float], step: int | None = None, flops: float | None = None) -> None:
        """Metrics in one call; with `flops` also as curves over charged FLOPs (`by_flops/NAME`)."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Tags, such as the reason why the stage ran."""

    def dataset(self, name: str, path: Path, digest: str, context: str) -> None:
        """A table the stage read, by name and digest."""

    def artifact(self, path: Path) -> None:
        """A file or folder to keep with the run."""

    def model(self, name: str, path: Path, digest: str) -> None:
        """A policy the stage made: by path and digest; its weights only when `log_weights` is set."""


@contextmanager
def track(settings: Tracking, layout: Layout, stage: str, recipe: str | None, seed: int | None) -> Iterator[Tracker]:
    """Open the record of one stage."""
    yield Tracker()
