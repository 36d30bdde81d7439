"""What a stage says about itself, as events: to the server while it answers, then to a file that
can be replayed.

This part of tracking knows no MLflow: `tracking` gives it the two functions that open a run and
write an event."""

import fcntl
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.common.files import digest_file

logger = logging.getLogger(__name__)

MAX_PARAM, MAX_TAG = 6000, 8000
METRICS_SECONDS = 2.0
Event = dict[str, Any]
Write = Callable[[Event], None]


class Tracker:
    """What a stage says about itself while it runs. `Tracker()` records nothing."""

    def __init__(
        self, journal: "Journal | None" = None, root: Path = Path(), log_weights: bool = False
    ) -> None:
        self.journal, self.root, self.log_weights = journal, root, log_weights
        self.points: list[Event] = []
        self.told = time.monotonic()

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters, nested ones flattened with dots; a value beyond MLflow's length is cut, with
        a note."""
        self._say(
            "params", values={key: shorten(value, MAX_PARAM) for key, value in flatten(values)}
        )

    def metrics(
        self,
        values: Mapping[str, float | None],
        step: int | None = None,
        flops: float | None = None,
    ) -> None:
        """Metrics at a step; with `flops` also as curves over charged FLOPs, as `by_gflops/NAME`.

        They are sent together every few seconds: a call costs as much as a training step of a small
        policy.

        The step of those is the whole number of GFLOPs, always: MLflow's step is an integer, its
        page draws integers exactly up to 9e15, and so this axis holds up to 9e24 FLOPs, beyond any
        run, in one unit. None is left out."""
        present = {name: float(value) for name, value in values.items() if value is not None}
        gflops = None if flops is None else round(flops / 1e9)
        self.points.append(
            {"values": present, "time": milliseconds(), "step": step or 0, "gflops": gflops}
        )
        if time.monotonic() - self.told > METRICS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send the metrics that wait."""
        points, self.points, self.told = self.points, [], time.monotonic()
        if points and self.journal is not None:
            self.journal.tell("metrics", points=points)

    def tags(self, values: Mapping[str, str]) -> None:
        """Tags, such as the reason why the stage ran."""
        self._say("tags", values={key: shorten(value, MAX_TAG) for key, value in values.items()})

    def dataset(self, name: str, path: Path, digest: str, context: str) -> None:
        """A table the stage read, by name and digest, linked to the run whose `output` has this
        path and digest."""
        self._say(
            "dataset",
            name=name,
            path=str(path.absolute()),
            key=self._key(path),
            digest=digest,
            context=context,
        )

    def output(self, path: Path, digest: str) -> None:
        """A file the stage made; later runs find this run by its digest."""
        self._say("output", key=self._key(path), digest=digest)

    def artifact(self, path: Path) -> None:
        """A file or folder to keep with the run."""
        self._say("artifact", path=str(path.absolute()))

    def model(self, name: str, path: Path, digest: str) -> None:
        """A policy the stage made: by path and digest; its weights only when `log_weights` is
        set."""
        where = {"path": str(path.absolute()), "key": self._key(path)}
        self._say("model", name=name, digest=digest, weights=self.log_weights, **where)

    def champion(self, evidence: Path | None, why: str) -> None:
        """Move the alias `champion` to the policy whose training wrote the file `evidence`; None
        takes it away."""
        found = (
            None
            if evidence is None
            else {"key": self._key(evidence), "digest": digest_file(evidence)}
        )
        self._say("champion", evidence=found, why=why)

    def _key(self, path: Path) -> str:
        return key_of(self.root, path)

    def _say(self, kind: str, **fields: Any) -> None:
        self.flush()
        if self.journal is not None:
            self.journal.tell(kind, **fields)


class Journal:
    """Sends events to the server until one fails; keeps that one and all later ones in a file.

    `open_run` makes the run of the `start` event, and returns the function that writes an event
    into it."""

    def __init__(self, uri: str, start: Event, folder: Path, open_run: Callable[[], Write]) -> None:
        name = f"{start['name'].replace(' ', '-').replace('/', '-')}-{start['record']}"
        self.uri, self.start, self.pending = uri, start, folder / "pending" / f"{name}.jsonl"
        self.write: Write | None = None
        try:
            with locked(folder):
                self.write = open_run()
        except Exception as error:  # whatever it is: a record never stops a stage
            self._fall_over(error)

    def tell(self, kind: str, **fields: Any) -> None:
        """Write one event, where it can be written."""
        event = {"kind": kind, "time": milliseconds(), **fields}
        if self.write is not None:
            try:
                return self.write(event)
            except Exception as error:  # as above
                if refused(error):
                    return logger.warning("MLflow does not take this %s: %s", kind, error)
                self._fall_over(error)
        return self._keep(event)

    def _fall_over(self, error: Exception) -> None:
        self.write = None
        cause = str(error).strip().split("\n")[0][:200]
        logger.warning(
            "tracking at %s failed (%s: %s); the stage goes on, its record goes to %s. Replay it "
            "with: "
            "python -m tasks.common.tracking replay %s --uri %s",
            *(self.uri, type(error).__name__, cause, self.pending, self.pending, self.uri),
        )
        self._keep(self.start)

    def _keep(self, event: Event) -> None:
        try:
            self.pending.parent.mkdir(parents=True, exist_ok=True)
            with self.pending.open("a") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            if event is self.start:
                logger.warning(
                    "%s cannot be written either (%s): nothing is recorded", self.pending, error
                )


def refused(error: Exception) -> bool:
    """Whether the server is well and this one record is not to its liking."""
    return getattr(error, "error_code", "") in (
        "INVALID_PARAMETER_VALUE",
        "RESOURCE_ALREADY_EXISTS",
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as dotted keys; lists and empty mappings as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, str) else json.dumps(value, default=str),
            )


def shorten(text: str, limit: int) -> str:
    """`text` within `limit` characters; what is cut is said."""
    if len(text) <= limit:
        return text
    note = f"... (cut, {len(text)} characters)"
    return text[: limit - len(note)] + note


def key_of(root: Path, path: Path) -> str:
    """A path as it is named in tags: relative to the data root where it lies inside."""
    absolute, base = path.absolute(), root.absolute()
    return (absolute.relative_to(base) if absolute.is_relative_to(base) else absolute).as_posix()


def milliseconds() -> int:
    return math.floor(time.time() * 1000)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One stage at a time makes runs here, or two would open two parents. What is done inside is
    bounded in time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
