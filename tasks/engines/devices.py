"""The GPUs of this machine that a stage computes on, and the lock on each of them.

Two stages on one GPU would compete for its memory. So a second stage waits, whether another flow, a
deployment or a concurrent `dvc repro` started it. The locks are files in one folder of the machine.
Their names contain the GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES. The kernel
releases the locks of a process that ends. A CPU is shared, and has no lock."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from tasks.common.processes.locks import exclusive
from tasks.engines.loading import engine_name, num_trainer_gpus
from tasks.engines.settings import EngineSettings
from tasks.models.policy import torch_device

FOLDER = "WINNOW_LOCKS"


def sampling_gpus(settings: EngineSettings) -> list[str]:
    """Return the UUIDs of the engine's local GPUs (none if `urls` or cluster engines are set)."""
    if settings.urls or settings.has_cluster_engines:
        return []
    servers = settings.num_server_gpus if engine_name(settings) == "server" else 1
    return first_gpus(torch_device(settings.device), servers)


def training_gpus(settings: EngineSettings, num_processes: int) -> list[str]:
    """Return the UUIDs of the trainer's and engine's local GPUs (none on a CPU or a cluster)."""
    if settings.cluster != "local":  # Ray places them
        return []
    device = torch_device(settings.device)
    beside = num_trainer_gpus(settings, num_processes, device)
    if beside:
        return first_gpus(device, beside + settings.num_server_gpus)
    return max(first_gpus(device, num_processes), sampling_gpus(settings), key=len)


def first_gpus(device: torch.device, num: int) -> list[str]:
    """Return the UUIDs of the first `num` GPUs that this process sees; an empty list on a CPU."""
    if device.type != "cuda":
        return []
    seen = min(num, torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(seen)]


@contextmanager
def held(gpus: Iterable[str]) -> Iterator[None]:
    """Hold the locks of the GPUs with these UUIDs. Every process acquires locks in the same order,
    so two stages never deadlock."""
    with ExitStack() as stack:
        for gpu in sorted(set(gpus)):
            stack.enter_context(exclusive(folder() / f"gpu-{gpu}", f"the GPU {gpu}"))
        yield


def folder() -> Path:
    """Return the folder of the locks, which all users of this machine share. It is WINNOW_LOCKS if
    that is set, else `winnow-locks` in the temporary folder."""
    path = Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / "winnow-locks")
    path.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # another user created it
        path.chmod(0o1777)
    return path
