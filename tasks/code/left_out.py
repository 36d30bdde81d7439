"""Files and libraries that are excluded from every digest on purpose, each with the reason why it
cannot change a result.

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

LIBRARIES = {
    "aiohttp": "moves bytes",
    "botocore": "moves bytes",
    "fsspec": "moves bytes",
    "httpx": "moves bytes",
    "httpx2": "moves bytes",
    "huggingface_hub": "fetches what a commit hash names",
    "matplotlib": "draws the report's plots",
    "mlflow": "the record",
    "openai": "moves bytes",
    "plotly": "draws the report's page",
    "psutil": "processes",
    "pyarrow": "a file format",
    "ray": "starts processes on other machines",
    "safetensors": "a file format",
    "tqdm": "the progress bar",
    "yaml": "a file format",
}
"""A module that some stage imports, and the reason why its version does not matter."""

POLICY = {
    "tasks/common/": "reads parameters, writes files, draws the bar",
    "tasks/engines/": "the locks of GPUs",
    "tasks/grading/": "settings that those of training name",
    "tasks/train/": "how often the making is saved",
    "tasks/models/": "saves, loads and describes a policy, whatever its weights",
    "tasks/__init__.py": "empty",
    "tasks/policy/__main__.py": "the command line",
    "tasks/policy/run.py": "made here or fetched, then recorded",
    "tasks/policy/card.py": "what is said of a policy",
    "tasks/policy/source.py": "fetches external policies; counts for those",
}
"""For the stage `policy` alone, with its result in git: only code that makes the weights counts."""


def is_left_out(path: str) -> bool:
    """Return whether the file at this path, relative to the project, cannot change a result."""
    return path.startswith(tuple(FILES))
