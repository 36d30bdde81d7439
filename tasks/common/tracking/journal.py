"""A stage's records as events: sent to the server until one fails, then written to a file.

This module does not depend on MLflow: the package `tracking` passes in two functions, which open a
run and write an event."""

import errno
import fcntl
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.common.files import digest, digest_file, make_private_folder
from tasks.common.redaction import without_secrets

logger = logging.getLogger(__name__)

MAX_PARAM, MAX_TAG, MAX_DESCRIPTION = 6000, 8000, 5000
CHECKSUM = "checksum"  # the last key of a line in a pending file
METRICS_SECONDS = 2.0
DENSE_POINTS = 1000  # at the start of a curve; each doubling halves the kept share
Event = dict[str, Any]
Write = Callable[[Event], None]


class Tracker:
    """Records the parameters, metrics and files of a running stage. `Tracker()` records nothing."""

    def __init__(
        self, journal: "Journal | None" = None, root: Path = Path(), max_weights_gb: float = 0.0
    ) -> None:
        self.journal, self.root, self.max_weights_gb = journal, root, max_weights_gb
        self.axis = ("charged", 0.0)  # of the curves over compute: see `axis_of`
        self.spent = (0.0, 0.0)  # the last step's FLOPs: charged, and in the axis's account
        self.points: list[Event] = []
        self.num_points: Counter[str] = Counter()  # per curve, including omitted points
        self.last: dict[str, Event] = {}  # per curve: the last point, if it was omitted
        self.told = time.monotonic()

    def params(self, values: Mapping[str, Any]) -> None:
        """Record parameters, flattened with dots. Values above MLflow's limit are truncated."""
        self._record("params", values=cut(values))

    def metrics(
        self,
        values: Mapping[str, float | None],
        step: int | None = None,
        flops: float | None = None,
    ) -> None:
        """Record metrics at a step and, with `flops` (the charged FLOPs so far), also as curves
        against GFLOPs on `axis`, named `by_gflops/NAME`. None values are omitted.

        Metrics are sent together every few seconds, since a request takes as long as a training
        step of a small policy.

        The step of a `by_gflops/` curve is the number of GFLOPs, rounded to an integer as MLflow
        requires. MLflow's page draws integers exactly up to 9e15 GFLOPs, which is 9e24 FLOPs, more
        than any run takes."""
        self.add(values, step, flops)
        if time.monotonic() - self.told > METRICS_SECONDS:
            self.flush()

    def add(
        self,
        values: Mapping[str, float | None],
        step: int | None = None,
        flops: float | None = None,
    ) -> None:
        """Add metrics to be sent later, from any thread. Curves are thinned: see `is_kept`."""
        whole = point(values, milliseconds(), step, self._on_axis(values, flops))
        kept = dict[str, float]()
        for name, value in whole["values"].items():
            if is_kept(self.num_points[name]):
                kept[name] = value
                self.last.pop(name, None)
            else:
                self.last[name] = {**whole, "values": {name: value}}
            self.num_points[name] += 1
        if kept:
            self.points.append({**whole, "values": kept})

    def _on_axis(self, values: Mapping[str, Any], flops: float | None) -> float | None:
        """Return the FLOPs on the axis at `flops` charged ones. A step's values have them. A point
        of the validation curve has those of the step before, or none if that was not recorded."""
        account, profile = self.axis
        found = flops if account == "charged" else values.get(f"flops_{account}")
        if flops is not None and found is not None:
            self.spent = flops, found
        return self.spent[1] + profile if flops == self.spent[0] else None

    def close(self) -> None:
        """Send the pending metrics, and the last point of every curve."""
        self.points += sorted(self.last.values(), key=lambda one: int(one["step"]))
        self.last = {}
        self.flush()

    def flush(self) -> None:
        points, self.points, self.told = self.points, [], time.monotonic()
        if points and self.journal is not None:
            self.journal.record("metrics", points=points)

    def tags(self, values: Mapping[str, str]) -> None:
        """Record tags, such as the reason why the stage ran."""
        shown = {key: shorten(without_secrets(value), MAX_TAG) for key, value in values.items()}
        self._record("tags", values=shown)

    def dataset(self, name: str, path: Path, digest: str, context: str) -> None:
        """Record a table that the stage read, by name and digest, linked to the run that recorded
        it as `output` with this path and digest."""
        self._record("dataset", **self._dataset(name, path, digest, context))

    def output(self, path: Path, digest: str) -> None:
        """Record a file that the stage wrote, so that later runs find this run by its digest."""
        self._record("output", key=key_of(self.root, path), digest=digest)

    def artifact(self, path: Path) -> None:
        """Record a file or folder to store with the run."""
        self._record("artifact", path=str(path.absolute()))

    def model(self, name: str, path: Path, digest: str) -> None:
        """Record a policy: path, digest, and its files if they are at most `max_weights_gb`."""
        where = {"path": str(path.absolute()), "key": key_of(self.root, path)}
        weights = 0 < size_of(path) <= self.max_weights_gb * 1e9
        self._record("model", name=name, digest=digest, weights=weights, **where)

    def champion(self, evidence: Path | None, why: str, candidate: Path | None = None) -> None:
        """Move the alias `champion` to the policy whose training run wrote the file `evidence`, and
        the alias `candidate` likewise; None removes an alias. `why` is the reason, as text."""
        self._record(
            "champion", evidence=self._named(evidence), why=why, candidate=self._named(candidate)
        )

    def experiment(
        self, params: Mapping[str, Any], metrics: Mapping[str, float | None], headline: str
    ) -> None:
        """Record the experiment's parameters and summary in the tracking run of the pipeline, and
        its answer as the description of this run and of the experiment."""
        points, answer = [point(metrics, milliseconds())], shorten(headline, MAX_DESCRIPTION)
        self._record("experiment", values=cut(params), points=points, headline=answer)

    def cell(
        self,
        recipe: str,
        seed: int,
        params: Mapping[str, Any],
        points: list[Event],
        *,
        datasets: Mapping[str, Path],
        outputs: Iterable[Path],
    ) -> None:
        """Record one recipe and seed: settings, results and curves, inputs and outputs. A repeated
        call is recorded only once, because `result` is a digest of the record."""
        values, made = cut(params), [self._named(path) for path in outputs]
        cell = {"recipe": recipe, "seed": seed, "values": values, "outputs": made}
        metrics = [{**one, "time": None} for one in points]
        self._record(
            "cell",
            **cell,
            points=points,
            datasets=[
                self._dataset(name, path, digest_file(path), "experiment")
                for name, path in datasets.items()
            ],
            result=digest([cell, metrics]),
        )

    def _named(self, path: Path | None) -> dict[str, str] | None:
        if path is None:
            return None
        return {"key": key_of(self.root, path), "digest": digest_file(path)}

    def _dataset(self, name: str, path: Path, digest: str, context: str) -> Event:
        where = {"path": str(path.absolute()), "key": key_of(self.root, path)}
        return {"name": name, "digest": digest, "context": context, **where}

    def _record(self, kind: str, **fields: Any) -> None:
        self.flush()
        if self.journal is not None:
            self.journal.record(kind, **fields)


class Journal:
    """Sends events to the server until one fails; writes that event and all later ones to a file.

    `open_run` creates the run of the `start` event, and returns the function that writes an event
    into it."""

    def __init__(self, uri: str, start: Event, folder: Path, open_run: Callable[[], Write]) -> None:
        name = f"{start['name'].replace(' ', '-').replace('/', '-')}-{start['record']}"
        self.uri, self.start, self.pending = uri, start, folder / "pending" / f"{name}.jsonl"
        self.write: Write | None = None
        self.is_lost = False  # whether events are lost: the file failed too
        self.listeners: list[Write] = []  # receive every event as well, and never raise
        try:
            with locked(folder):
                self.write = open_run()
        except Exception as error:  # of any kind: a record never stops a stage
            self._use_file(error)

    def record(self, kind: str, **fields: Any) -> None:
        """Write one event to the server, or to the file after a failure; log a rejected event."""
        event = {"kind": kind, "time": milliseconds(), **fields}
        for listen in self.listeners:
            listen(event)
        if self.write is not None:
            try:
                return self.write(event)
            except Exception as error:  # as above
                if refused(error):
                    return logger.warning("MLflow does not accept this %s: %s", kind, error)
                self._use_file(error)
        return self._keep(event)

    def _use_file(self, error: Exception) -> None:
        self.write = None
        cause = str(error).strip().split("\n")[0][:200]
        logger.warning(
            "tracking at %s failed (%s: %s); the stage continues and records to %s. Replay it "
            "with: winnow push %s %s",
            *(self.uri, type(error).__name__, cause, self.pending, self.pending, self.uri),
        )
        self._keep(self.start)

    def _keep(self, event: Event) -> None:
        """Append an event to the file atomically: lines after a partial line, or without the start
        event at the beginning, could not be replayed."""
        try:
            make_private_folder(self.pending.parent)
            with self.pending.open("ab", buffering=0) as file:
                size = file.tell()
                events = [event] if size or event is self.start else [self.start, event]
                lines = "".join(map(line_of, events)).encode()
                try:
                    if file.write(lines) < len(lines):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(size)
                    if not size:
                        self.pending.unlink()
                    raise
        except OSError as error:
            if not self.is_lost:
                what = "nothing is recorded" if event is self.start else "a part is not recorded"
                logger.warning(
                    "%s cannot be written either (%s): %s. The stage continues",
                    *(self.pending, error.strerror, what),
                )
            self.is_lost = True


def line_of(event: Event) -> str:
    """Return an event as a line for a pending file, with its checksum."""
    value = json.loads(json.dumps(event))
    return json.dumps({**value, CHECKSUM: digest(value)}) + "\n"


def read_events(path: Path) -> list[Event]:
    """Return the events of a pending file. Raise a ValueError naming the first damaged line."""
    *lines, end = path.read_bytes().split(b"\n")
    if end:  # a line truncated by a kill
        logger.warning("ignoring the last line of %s, which is incomplete", path)
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = dict(json.loads(line.decode()))
            if event.pop(CHECKSUM, None) != digest(event):
                raise ValueError("it does not match its checksum")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}): delete that line and "
                "replay the others, or delete the file"
            ) from error
        events.append(event)
    return events


def refused(error: Exception) -> bool:
    """Return whether the server works but rejects this one record."""
    return getattr(error, "error_code", "") in (
        "INVALID_PARAMETER_VALUE",
        "RESOURCE_ALREADY_EXISTS",
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every leaf of nested mappings; non-strings as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, str) else json.dumps(value, default=str),
            )


def cut(values: Mapping[str, Any]) -> dict[str, str]:
    """Return parameters in MLflow's form: flat, truncated, and without the secrets in URLs."""
    return {key: shorten(without_secrets(value), MAX_PARAM) for key, value in flatten(values)}


def is_kept(number: int) -> bool:
    """Return whether point `number` of a curve, from 0, is recorded: all up to `DENSE_POINTS`, then
    every second up to twice as many, every fourth up to four times as many, and so on."""
    return number % (1 << (number // DENSE_POINTS).bit_length()) == 0


def point(
    values: Mapping[str, float | None],
    when: int,
    step: int | None = None,
    flops: float | None = None,
) -> Event:
    """Return metrics at a step (None: 0) and, with `flops`, also at a whole number of GFLOPs."""
    present = {name: float(value) for name, value in values.items() if value is not None}
    gflops = None if flops is None else round(flops / 1e9)
    return {"values": present, "time": when, "step": step or 0, "gflops": gflops}


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of the files directly in a folder; 0 if missing."""
    return sum(file.stat().st_size for file in (path, *path.glob("*")) if file.is_file())


def shorten(text: str, limit: int) -> str:
    """Return `text` as valid UTF-8 within `limit` characters, with a note if it was truncated."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= limit:
        return text
    note = f"... (cut, {len(text)} characters)"
    return text[: limit - len(note)] + note


def key_of(root: Path, path: Path) -> str:
    """Return a path for use in tags: relative to the data root if it is inside."""
    absolute, base = path.absolute(), root.absolute()
    return (absolute.relative_to(base) if absolute.is_relative_to(base) else absolute).as_posix()


def milliseconds() -> int:
    return math.floor(time.time() * 1000)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other stages from creating a run during the block, since two could create the same
    parent run. They wait without a limit, so the block must take bounded time."""
    make_private_folder(folder)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
