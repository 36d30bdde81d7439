"""A substitute for `tasks.common.tracking` in the scratch project: it writes the calls of the flow
to a file, without MLflow."""

import json
from collections.abc import Iterable

from tasks.common.files import replace_file
from tasks.common.layout import Layout
from tasks.common.tracking.journal import Tracker
from tasks.common.tracking.settings import Tracking

__all__ = ["Tracker", "Tracking"]

PIPELINE_VARIABLE = "WINNOW_PIPELINE"


def start_pipeline() -> str:
    return "a-flow"


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
