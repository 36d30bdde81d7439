"""Trackio. Writes to `trackio/` under the run's folder unless TRACKIO_DIR, or a Space or server in
the environment, names another place."""

import os
from typing import Any

from tasks.common.tracking.trackers import PROJECT, MirrorRun, Point, with_gflops


class Client:
    """Trackio resumes the latest run with the same name. So an empty file in `trackio-runs` marks
    each started run, and only a marked run is resumed. Parameters are set at a run's start."""

    def __init__(self, run: MirrorRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio

        note = run.folder / "trackio-runs" / run.id
        self.run: Any = trackio.init(
            PROJECT,
            name=run.name,
            group=run.group,
            config=run.params,
            resume="allow" if note.exists() else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
        self.first_step = getattr(self.run, "_next_step", 0)

    def points(self, points: list[Point]) -> None:
        """Log the points, except steps that the run already had when it was opened: after a kill,
        training repeats them unchanged."""
        for one in points:
            if one["step"] >= self.first_step:
                self.run.log(with_gflops(one), step=one["step"])

    def final(self, values: dict[str, float]) -> None:
        self.run.log(values)

    def close(self, finished: bool) -> None:
        import trackio

        trackio.finish()
