"""One benchmark on several machines: finished cells and claims in a place that all of them reach, a
folder or `s3://bucket/prefix`.

A machine claims a cell before it runs it, and others leave it alone; a claim that is older than
CLAIM_SECONDS is that of a machine that died. Buckets have no locks, so two machines that claim at
the same moment both run the cell, and each keeps its own line. Machines of one kind make the same
line but for its seconds; of different kinds, their policies differ by rounding."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from tasks.benchmark.results import Line
from tasks.common.files import ArtifactError, digest, replace_file
from tasks.common.locations import open_location, reaching

CLAIM_SECONDS = 600.0  # a claim is renewed at every look at the others


def owner_of(work: Path) -> str:
    """The benchmark that works in a folder of this machine, which but one process may: after a
    restart it is the same owner."""
    return f"{socket.gethostname()}-{digest(str(work.resolve()))}"


class Shared:
    """The shared place. `owner` names this machine's benchmark in its claims."""

    def __init__(self, location: str, owner: str) -> None:
        self.location, self.owner = location, owner
        self.files, self.root = open_location(location)
        self.known: set[str] = set()

    def new_lines(self) -> list[Line]:
        """The lines that other machines, or earlier runs, have put there and that were not read
        yet."""
        with reaching(self.location):
            folder = f"{self.root}/lines"
            names = self.files.ls(folder, detail=False) if self.files.exists(folder) else []
        lines = []
        for path in sorted(name for name in names if name.endswith(".json")):
            key = path.rsplit("/", 1)[-1].removesuffix(".json")
            if key not in self.known and path.endswith(".json"):
                lines.append(self.read(path))
                self.known.add(key)
        return lines

    def put(self, line: Line) -> None:
        """Give a finished cell to the others, unless they have it. A failure is not given: another
        machine may do better."""
        path = f"{self.root}/lines/{line['key']}.json"
        with reaching(self.location):
            is_there = self.files.exists(path)
        if "failed" not in line and not is_there:
            self.write(path, line)
            self.known.add(line["key"])

    def claim(self, key: str) -> bool:
        """Whether this machine may run the cell; if so it is claimed."""
        path = f"{self.root}/claims/{key}.json"
        with reaching(self.location):
            found = self.read(path) if self.files.exists(path) else None
        is_theirs = found is not None and found["owner"] != self.owner
        if found and is_theirs and time.time() - found["time"] < CLAIM_SECONDS:
            return False
        self.write(path, {"owner": self.owner, "time": time.time()})
        return True

    def read(self, path: str) -> dict[str, Any]:
        """An object. Raises ArtifactError for one that is not ours."""
        with reaching(self.location):
            content = self.files.cat_file(path)
        try:
            return dict(json.loads(content))
        except ValueError as error:
            raise ArtifactError(
                f"{path} is not a line of the benchmark: {error}; delete it"
            ) from error

    def write(self, path: str, value: Line) -> None:
        """Put an object there, whole or not at all."""
        content = (json.dumps(value, sort_keys=True) + "\n").encode()
        with reaching(self.location):
            if "file" not in self.files.protocol:
                self.files.pipe_file(path, content)
                return
            replace_file(Path(path), lambda file: file.write(content))
