"""Stands for `tasks.common.tracking` in the scratch project: it writes down what the flow says,
without MLflow."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.common.files import replace_file
from tasks.common.layout import Layout

PIPELINE_VARIABLE = "WINNOW_PIPELINE"


@dataclass(frozen=True)
class Tracking:
    uri: str | None
    experiment: str
    max_weights_gb: float
    also: list[str]


def start_pipeline(layout: Layout, kind: str = "flow") -> str:
    return f"a-{kind}"


def end_pipeline(
    settings: Tracking,
    layout: Layout,
    pipeline: str,
    status: str = "FINISHED",
    cached: Iterable[tuple[str, str | None, int | None]] = (),
) -> None:
    record = {"pipeline": pipeline, "status": status, "cached": sorted(map(list, cached), key=str)}
    replace_file(
        layout.tracking / "record.json", lambda file: file.write(json.dumps(record).encode())
    )
