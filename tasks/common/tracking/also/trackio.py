"""Trackio. In `trackio/` of the folder unless TRACKIO_DIR, or a Space or server in the environment,
says otherwise."""

import os
from typing import Any, cast

from tasks.common.tracking.also import PROJECT, MirrorRun, Point, with_gflops


class Client:
    """Trackio knows a run by its name, and the latest of a name is gone on with: a note in the
    folder says whether that is this one. Parameters are given when it begins."""

    def __init__(self, run: MirrorRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        self.told, self.run = run, cast(Any, None)
        self.config: dict[str, str] = {}
        self.note = run.folder / "trackio-runs" / run.id

    def params(self, values: dict[str, str]) -> None:
        self.config.update(values)

    def begin(self) -> None:
        import trackio

        self.run = trackio.init(
            PROJECT,
            name=self.told.name,
            group=self.told.group,
            config=self.config,
            resume="allow" if self.note.exists() else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.touch()
        self.first_step = getattr(self.run, "_next_step", 0)

    def points(self, points: list[Point]) -> None:
        """Steps that the run has already are left out: after a kill they come again, and are the
        same."""
        if self.run is None:
            self.begin()
        for one in points:
            if one["step"] >= self.first_step:
                self.run.log(with_gflops(one), step=one["step"])

    def final(self, values: dict[str, float]) -> None:
        if self.run is None:
            self.begin()
        self.run.log(values)

    def close(self, finished: bool) -> None:
        if self.run is not None:
            import trackio

            trackio.finish()
