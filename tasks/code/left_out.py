"""Files that are excluded from every digest on purpose, each with the reason why it cannot change a
result. Libraries without a line in `versions` are listed, with reasons, in the tests.

Everything else that a stage can load is in its digest. A line here claims that no change of that
file, of any kind, changes a number; a file with mixed contents does not belong in this list."""

FILES = {
    "tasks/code/": "digests of the code; the stages do not load it",
    "tasks/common/config/changes.py": "descriptions of changes",
    "tasks/common/code.py": "digests of the code, for records",
    "tasks/common/inputs.py": "only stops a stage whose inputs have changed",
    "tasks/common/locations.py": "access to locations: the bytes are the same from all of them",
    "tasks/common/processes/ending.py": "when a process ends",
    "tasks/common/processes/forks.py": "how a stage's process starts",
    "tasks/common/processes/locks.py": "one writer at a time",
    "tasks/common/progress.py": "the progress bar",
    "tasks/common/recovery.py": "advice for damaged files",
    "tasks/common/stage.py": "the command line, logging, the exit status",
    "tasks/common/tracking/": "the record in MLflow",
    "tasks/engines/cluster/": "the machine of a process, and its restarts",
    "tasks/engines/devices.py": "the locks of GPUs",
    "tasks/engines/memory.py": "only stops training that does not fit the GPU",
    "tasks/engines/server/gate.py": "only moves bytes",
    "tasks/store/admin/": "maintenance by hand; no stage loads it",
    "tasks/store/compaction.py": "maintenance: rows move to fewer files, none changes",
    "tasks/store/usage.py": "descriptions of reused and sampled rollouts",
}
"""A path, or a prefix of paths, and the reason."""


def is_left_out(path: str) -> bool:
    """Return whether the file at this path, relative to the project, cannot change a result."""
    return path.startswith(tuple(FILES))
