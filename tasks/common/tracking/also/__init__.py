"""Trackers beside MLflow: `tracking.also` names files of this folder, each of which writes through
that tracker's own client.

    python -m tasks.common.tracking.also wandb tensorboard

A stage starts that command and hands it messages, a line of JSON each (see `mirrors`). So nothing
of a client runs in the stage's process: not its import, not its threads, not its waits. A file has

    class Client:
        def __init__(self, run: Run) -> None: ...                   # begin a run, or go on with it
        def params(self, values: dict[str, str]) -> None: ...
        def points(self, points: list[Point]) -> None: ...          # metrics at a step
        def final(self, values: dict[str, float]) -> None: ...      # what was reached
        def close(self, finished: bool) -> None: ...

and keeps what it writes in the run's folder, unless the user's environment says where."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = "winnow"
Point = dict[str, Any]  # as `journal.point` makes them


@dataclass(frozen=True)
class MirrorRun:
    """One training: its id, which stays when it goes on after a kill; recipe and seed as its name;
    the experiment; and a folder."""

    id: str
    name: str
    group: str
    folder: Path


def with_gflops(one: Point) -> dict[str, float]:
    """The values of a point, with its compute as one of them: the axis of a chart."""
    gflops = one["gflops"]
    return {**one["values"], **({} if gflops is None else {"gflops": float(gflops)})}
