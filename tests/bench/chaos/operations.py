"""The file operations of all processes of a world: `operations.c` counts, stops or fails them."""

import mmap
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("operations.c")
COUNT, STOP, FULL = 0, 1, 2
SEEN, SEEN_RECORD, AT, ACTION, REACHED, GO_ON, PID, RECORD = range(0, 64, 8)
WHAT, ROOT, SIZE = 64, 512, 1024


def compiler() -> str | None:
    """Return the C compiler of this machine."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build(folder: Path) -> Path:
    """Compile the preloaded library in `folder`, and return its path."""
    library, cc = folder / "operations.so", compiler()
    if cc is None:
        raise RuntimeError("no C compiler: install gcc")
    line = [cc, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(line, check=True)
    return library


@dataclass
class Plan:
    """The counters of one world's processes, and the action at an operation."""

    library: Path
    path: Path
    memory: mmap.mmap

    @classmethod
    def make(cls, library: Path, path: Path, root: Path) -> "Plan":
        """Return the plan of the world with files under `root`."""
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), SIZE)
        name = str(root).encode()
        memory[ROOT : ROOT + len(name)] = name
        return cls(library, path, memory)

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CHAOS_PLAN": str(self.path)}

    def set(self, action: int = COUNT, at: int = 0, record: bool = False) -> None:
        """Reset the counters, and set the action at operation `at`."""
        self.memory[:ROOT] = bytes(ROOT)
        self._write(RECORD, int(record))
        self._write(AT, at)
        self._write(ACTION, action)

    def step(self, operations: int) -> None:
        """Release the stopped thread, and stop the thread that is `operations` operations later."""
        self._write(REACHED, 0)
        self._write(AT, self._read(SEEN) + operations)

    def go_on(self) -> None:
        """Release the stopped thread, without further actions."""
        self._write(ACTION, COUNT)
        self._write(GO_ON, 1)

    @property
    def counted(self) -> tuple[int, int]:
        """The operations so far: outside MLflow's record, and on it."""
        return self._read(SEEN), self._read(SEEN_RECORD)

    @property
    def reached(self) -> bool:
        return bool(self._read(REACHED))

    @property
    def pid(self) -> int:
        """The process that reached the operation."""
        return self._read(PID)

    @property
    def what(self) -> str:
        return bytes(self.memory[WHAT:ROOT]).split(b"\0")[0].decode(errors="replace")

    def _read(self, place: int) -> int:
        (value,) = struct.unpack_from("q", self.memory, place)
        return int(value)

    def _write(self, place: int, value: Any) -> None:
        struct.pack_into("q", self.memory, place, value)
