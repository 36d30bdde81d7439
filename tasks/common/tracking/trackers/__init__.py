"""Trackers besides MLflow: `tracking.also` names files of this folder. Each writes through its
tracker's own client.

    python -m tasks.common.tracking.trackers wandb tensorboard

A stage starts that command and sends it messages, one line of JSON each (see `mirrors`). So no part
of a client runs in the stage's process: not its import, its threads or its waits. Each file has

    class Client:
        def __init__(self, run: MirrorRun) -> None: ...             # start or resume a run
        def points(self, points: list[Point]) -> None: ...          # metrics at a step
        def final(self, values: dict[str, float]) -> None: ...      # results
        def close(self, finished: bool) -> None: ...

and writes into the run's folder, unless the user's environment names another place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = "winnow"
Point = dict[str, Any]  # as `journal.point` returns them


@dataclass(frozen=True)
class MirrorRun:
    """One training run: its id, which a resumed run keeps; its name, RECIPE/SEED; the experiment
    as its group; the trackers' folder; and its parameters."""

    id: str
    name: str
    group: str
    folder: Path
    params: dict[str, str]


def with_gflops(one: Point) -> dict[str, float]:
    """Return the values of a point, with its GFLOPs added as a chart's axis."""
    gflops = one["gflops"]
    return {**one["values"], **({} if gflops is None else {"gflops": float(gflops)})}
