"""One benchmark on several machines: finished cells and claims in a shared place, a folder or
`s3://bucket/prefix`.

A machine claims a cell before it runs it, and the others skip claimed cells. A claim older than
CLAIM_SECONDS belongs to a machine that died. Buckets have no locks, so two machines that claim at
the same moment both run the cell, and each keeps its own line. Machines of one kind make the same
line except for its seconds; on different kinds, policies differ by rounding."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from tasks.benchmark.results import Line
from tasks.common.files import ArtifactError, digest, replace_file
from tasks.common.locations import open_location, reaching

CLAIM_SECONDS = 600.0  # a claim is renewed at every poll


def owner_of(work: Path) -> str:
    """Return the owner for a work folder of this machine. Only one process may use the folder, so
    the owner is the same after a restart."""
    return f"{socket.gethostname()}-{digest(str(work.resolve()))}"


class Shared:
    """The shared place. `owner` names this machine's benchmark in its claims."""

    def __init__(self, location: str, owner: str) -> None:
        self.location, self.owner = location, owner
        self.files, self.root = open_location(location)
        self.known: set[str] = set()

    def new_lines(self) -> list[Line]:
        """Return the lines from other machines or earlier runs that have not been read yet."""
        with reaching(self.location):
            folder = f"{self.root}/lines"
            names = self.files.ls(folder, detail=False) if self.files.exists(folder) else []
        lines = []
        for path in sorted(name for name in names if name.endswith(".json")):
            key = path.rsplit("/", 1)[-1].removesuffix(".json")
            if key not in self.known:
                lines.append(self.read(path))
                self.known.add(key)
        return lines

    def put(self, line: Line) -> None:
        """Share a finished cell, unless its line is already there. A failure is not shared: another
        machine may succeed."""
        path = f"{self.root}/lines/{line['key']}.json"
        with reaching(self.location):
            is_there = self.files.exists(path)
        if "failed" not in line and not is_there:
            self.write(path, line)
            self.known.add(line["key"])

    def claim(self, key: str) -> bool:
        """Claim the cell, and return whether this machine may run it."""
        path = f"{self.root}/claims/{key}.json"
        with reaching(self.location):
            found = self.read(path) if self.files.exists(path) else None
        is_theirs = found is not None and found["owner"] != self.owner
        if found and is_theirs and time.time() - found["time"] < CLAIM_SECONDS:
            return False
        self.write(path, {"owner": self.owner, "time": time.time()})
        return True

    def read(self, path: str) -> dict[str, Any]:
        """Return an object. Raises ArtifactError if it is not a line of the benchmark."""
        with reaching(self.location):
            content = self.files.cat_file(path)
        try:
            return dict(json.loads(content))
        except ValueError as error:
            raise ArtifactError(
                f"{path} is not a line of the benchmark: {error}; delete it"
            ) from error

    def write(self, path: str, value: Line) -> None:
        """Write an object atomically."""
        content = (json.dumps(value, sort_keys=True) + "\n").encode()
        with reaching(self.location):
            if "file" not in self.files.protocol:
                self.files.pipe_file(path, content)
                return
            replace_file(Path(path), lambda file: file.write(content))
