"""The messages to the trackers of `tracking.also`: for each recipe and seed, the parameters, the
curves by step, and the results in the report.

One process (`trackers`) receives them through a pipe and writes them. A running stage never waits:
if messages pile up, it warns and drops later ones. A finished stage waits up to LAST_SECONDS.

A training run keeps its id after a kill and resume: a file beside the record contains the id and a
digest of the run's parameters and inputs. The report finds the id in this file by the digest of the
curve. If no tracker has the training run, for example because DVC restored its results, the report
sends the curves."""

import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.common.checksums import read_note, write_checked
from tasks.common.files import digest, make_private_folder
from tasks.common.layout import Layout
from tasks.common.tracking.journal import Event
from tasks.common.tracking.system import is_load

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # messages, some hundred bytes each
LAST_SECONDS = 15.0  # the longest wait of a finished stage for its trackers
MAX_LOG = 1 << 20
ROOT = Path(__file__).resolve().parents[3]
Message = dict[str, Any]


class Writer:
    """The process that writes to the trackers. It is started with the first message."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names, self.log = list(names), folder / "trackers.log"
        self.waiting: queue.Queue[Message | None] = queue.Queue(MAX_WAITING)
        self.child: subprocess.Popen[str] | None = None
        self.thread = threading.Thread(target=self.pass_on, daemon=True)
        self.is_lost = False

    def send(self, message: Message) -> None:
        """Queue a message; do nothing if the process was lost."""
        if self.is_lost:
            return
        if self.child is None:
            self.start()
        try:
            self.waiting.put_nowait(message)
        except queue.Full:
            self.lose("their process is too slow")

    def start(self) -> None:
        """Start the process in its own session, so Ctrl-C reaches the stage alone; see `close`."""
        make_private_folder(self.log.parent)
        grown = self.log.exists() and self.log.stat().st_size > MAX_LOG
        with self.log.open("wb" if grown else "ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tasks.common.tracking.trackers", *self.names],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.thread.start()

    def pass_on(self) -> None:
        """Write queued messages into the pipe until `close`, or until its reader has ended."""
        assert self.child is not None
        assert self.child.stdin is not None
        with suppress(OSError, ValueError):
            while (message := self.waiting.get()) is not None:
                self.child.stdin.write(json.dumps(message) + "\n")
                self.child.stdin.flush()
        with suppress(OSError):
            self.child.stdin.close()

    def close(self) -> None:
        """Wait until everything is written or `LAST_SECONDS` have passed. The process exits when it
        has written everything, even if that is later."""
        if self.child is None or self.is_lost:
            return
        with suppress(queue.Full):
            self.waiting.put_nowait(None)
        try:
            if self.child.wait(LAST_SECONDS):
                self.lose(f"their process ended with status {self.child.returncode}")
        except subprocess.TimeoutExpired:
            logger.info("%s: still writing; its process ends by itself", ", ".join(self.names))

    def lose(self, why: str) -> None:
        self.is_lost = True
        names = ", ".join(self.names)
        logger.warning("a part of this run is missing in %s: %s; see %s", names, why, self.log)


class Mirrors:
    """Converts the events of one stage into messages for its trackers."""

    def __init__(self, names: Sequence[str], layout: Layout, start: Event) -> None:
        self.layout, self.group, self.tags = layout, start["experiment"], start["tags"]
        self.folder = layout.tracking / "also"
        self.writer = Writer(names, self.folder)
        self.begun: list[Event] = []  # of a training run that is not yet identified
        self.open_run: str | None = None

    def listen(self, event: Event) -> None:
        """Process one event. An error does not stop the stage."""
        if self.writer.is_lost:
            return
        try:
            self.take(event)
        except Exception as error:
            self.writer.lose(f"{type(error).__name__}: {error}")

    def take(self, event: Event) -> None:
        """Send the messages for one event, according to the kinds of event and stage."""
        kind, stage = event["kind"], self.tags["stage"]
        if kind == "cell":
            self.cell(event)
        elif stage == "train" and kind != "end":
            self.training(event)
        elif kind == "end":
            self.close(event["status"] == "FINISHED")

    def training(self, event: Event) -> None:
        """Collect parameters and inputs, which identify a training run; then send its curves."""
        recipe, seed = self.tags["recipe"], int(self.tags["seed"])
        if self.open_run is None:
            if event["kind"] in ("params", "dataset"):
                self.begun.append(event)
                return
            key = digest([[e.get("values"), e.get("digest")] for e in self.begun])
            known = self.known(recipe, seed)
            if known.get("key") != key:
                known = self.remember(recipe, seed, new_run(key))
            parts = [one["values"] for one in self.begun if one["kind"] == "params"]
            params = {name: value for values in parts for name, value in values.items()}
            self.open(recipe, seed, known["id"], params)
        # trackers measure the machine's load themselves
        points = [each for each in event.get("points", []) if not any(map(is_load, each["values"]))]
        if points:
            self.send("points", points=points)
        if event["kind"] == "output" and event["key"].endswith("train/curve.parquet"):
            known = self.known(recipe, seed)
            self.remember(recipe, seed, {**known, "curve": event["digest"]})

    def cell(self, event: Event) -> None:
        """Send a cell's results, and its curves if training did not; send nothing twice."""
        recipe, seed = event["recipe"], event["seed"]
        curve = next(o["digest"] for o in event["outputs"] if o["key"].endswith("curve.parquet"))
        known = self.known(recipe, seed)
        if known.get("curve") == curve and known["result"] == event["result"]:
            return
        result, *curves = event["points"]
        is_new = known.get("curve") != curve
        if is_new:
            known = new_run(None)
        self.open(recipe, seed, known["id"], event["values"])
        if is_new and curves:
            self.send("points", points=sorted(curves, key=lambda point: int(point["step"])))
        self.send("final", values=result["values"])
        self.remember(recipe, seed, {**known, "curve": curve, "result": event["result"]})

    def open(self, recipe: str, seed: int, identity: str, params: dict[str, str]) -> None:
        """Start or resume a run, unless it is open."""
        if self.open_run == identity:
            return
        folder = str(self.layout.tracking.absolute())
        run = {"id": identity, "name": f"{recipe}/{seed}", "group": self.group, "params": params}
        self.send("open", **run, folder=folder)
        self.open_run = identity

    def send(self, what: str, **fields: Any) -> None:
        self.writer.send({"do": what, **fields})

    def close(self, finished: bool) -> None:
        """Close the open run, if any, with the status of the stage, and wait for the writer."""
        if self.open_run:
            self.send("close", finished=finished)
        self.writer.close()

    def known(self, recipe: str, seed: int) -> dict[str, Any]:
        """Return the stored values of the run of a recipe and seed; empty if there are none."""
        return read_note(self.file(recipe, seed))

    def remember(self, recipe: str, seed: int, run: dict[str, Any]) -> dict[str, Any]:
        write_checked(self.file(recipe, seed), run)
        return run

    def file(self, recipe: str, seed: int) -> Path:
        return self.folder / recipe / f"{seed}.json"


def new_run(key: str | None) -> dict[str, Any]:
    """Return the values of a new run: a random id, and `key`, which identifies its training run."""
    return {"id": secrets.token_hex(4), "key": key, "curve": None, "result": None}
