"""Files that are excluded from every digest on purpose, each with the reason why it cannot change a
result. Libraries without a line in `versions` are listed, with reasons, in the tests.

Everything else that a stage can load is in its digest. A line here claims that no change of that
file, of any kind, changes a number; a file with mixed contents does not belong in this list."""

FILES = {
    "tasks/code/": "digests of the code; the stages do not load it",
    "tasks/common/config/changes.py": "the words for what changed",
    "tasks/common/code.py": "digests of the code, for records",
    "tasks/common/locations.py": "how a place is reached: the same bytes come from all of them",
    "tasks/common/processes/ending.py": "when a process ends",
    "tasks/common/processes/forks.py": "how a stage's process starts",
    "tasks/common/processes/locks.py": "one writer at a time",
    "tasks/common/progress.py": "the progress bar",
    "tasks/common/recovery.py": "the words for how to get a damaged file back",
    "tasks/common/stage.py": "the command line, logging, the exit status",
    "tasks/common/tracking/": "the record in MLflow",
    "tasks/engines/cluster/": "on which machine a process runs, and when it starts again",
    "tasks/engines/devices.py": "the locks of GPUs",
    "tasks/engines/memory.py": "stops a training that does not fit the GPU, and does nothing else",
    "tasks/engines/server/gate.py": "moves bytes, or does not",
    "tasks/store/admin/": "upkeep by hand; no stage loads it",
    "tasks/store/compaction.py": "upkeep: rows move to fewer files, none changes",
    "tasks/store/usage.py": "the words for what a stage reused and sampled",
}
"""A path, or a prefix of paths, and the reason."""


def is_left_out(path: str) -> bool:
    """Return whether the file at this path, relative to the project, cannot change a result."""
    return path.startswith(tuple(FILES))
