"""The file operations of all processes of a world: `operations.c` counts, stops or fails them."""

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("operations.c")
COUNT, STOP, FULL = 0, 1, 2
NUMBERS = ("seen", "seen_record", "at", "action", "reached", "released", "pid", "record")


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


class Plan(ctypes.Structure):
    """The counters of one world's processes, and the action at an operation, in memory that all of
    them share."""

    _fields_ = [
        *((name, ctypes.c_long) for name in NUMBERS),
        ("what", ctypes.c_char * 448),  # the operation that was reached
        ("root", ctypes.c_char * 512),
    ]
    library: Path
    path: Path

    @classmethod
    def make(cls, library: Path, path: Path, root: Path) -> "Plan":
        """Return the plan of the world with files under `root`."""
        path.write_bytes(bytes(ctypes.sizeof(cls)))
        with path.open("r+b") as file:
            plan = cls.from_buffer(mmap.mmap(file.fileno(), 0))
        plan.library, plan.path, plan.root = library, path, str(root).encode()
        return plan

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CHAOS_PLAN": str(self.path)}

    def set(self, action: int = COUNT, at: int = 0, record: bool = False) -> None:
        """Reset the counters, and set the action at operation `at`."""
        ctypes.memset(ctypes.byref(self), 0, Plan.root.offset)
        self.record, self.at, self.action = record, at, action

    def step(self, operations: int) -> None:
        """Release the stopped thread, and stop the thread that is `operations` operations later."""
        self.reached = 0
        self.at = self.seen + operations

    def go_on(self) -> None:
        """Release the stopped thread, without further actions."""
        self.action, self.released = COUNT, 1
