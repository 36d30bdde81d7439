"""TensorBoard: event files in `tensorboard/EXPERIMENT/RECIPE/SEED-ID` under the run's folder."""

from typing import Any

from tasks.common.tracking.trackers import MirrorRun, Point, with_gflops


class Client:
    """Writes results under `final/`. After a kill, repeated steps replace the earlier ones."""

    def __init__(self, run: MirrorRun) -> None:
        self.folder = run.folder / "tensorboard" / run.group / f"{run.name}-{run.id}"
        self.params = run.params
        self.writer: Any = None

    def begin(self, step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        has_run = any(self.folder.glob("events.*"))
        self.writer = SummaryWriter(str(self.folder), purge_step=step if has_run else None)
        rows = [f"| {key} | {value} |" for key, value in self.params.items()]
        if rows:
            table = "\n".join(["| name | value |", "|---|---|", *rows])
            self.writer.add_text("parameters", table)

    def points(self, points: list[Point]) -> None:
        for one in points:
            if self.writer is None:
                self.begin(one["step"])
            for name, value in with_gflops(one).items():
                self.writer.add_scalar(name, value, one["step"], walltime=one["time"] / 1000)

    def final(self, values: dict[str, float]) -> None:
        if self.writer is None:
            self.begin()
        for name, value in values.items():
            self.writer.add_scalar(f"final/{name}", value, 0)

    def close(self, finished: bool) -> None:
        if self.writer is not None:
            self.writer.close()
