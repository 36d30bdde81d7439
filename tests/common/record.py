"""Readers of the MLflow record under a data root."""

from pathlib import Path
from typing import Any

from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.tracking import Tracking

LOCAL = Tracking(uri=None, experiment="winnow", max_weights_gb=0.0, also=[])


def runs_of(layout: Layout, uri: str | None = None) -> dict[str, Any]:
    client = tracking.connect(uri or tracking.address(LOCAL, layout))
    experiment = client.get_experiment_by_name("winnow").experiment_id
    return {run.info.run_name: run for run in client.search_runs([experiment])}


def pending_files(layout: Layout, suffix: str = "jsonl") -> list[Path]:
    return sorted((layout.tracking / "pending").glob(f"*.{suffix}"))


def away(*_: Any) -> Any:
    raise ConnectionError("the server is away")
