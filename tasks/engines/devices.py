"""The GPUs of this machine that a stage computes on, and the lock that it holds on each.

Two stages on one GPU would take each other's memory. So a second one waits: of another flow, of a
deployment, or of a `dvc repro` beside them. The locks are files in one folder of the machine, named
by the GPU's own number, whatever CUDA_VISIBLE_DEVICES calls it; the kernel frees them when the
process ends. A CPU is shared, and has no lock."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from tasks.common.process import exclusive
from tasks.engines.loading import engine_name, num_trainer_gpus
from tasks.engines.settings import EngineSettings
from tasks.models.policy import torch_device

FOLDER = "WINNOW_LOCKS"


def sampling_gpus(settings: EngineSettings) -> list[str]:
    """The GPUs that the engine computes on; none of this machine's where servers are named."""
    if settings.urls or settings.has_cluster_engines:
        return []
    replicas = settings.num_replicas if engine_name(settings) == "server" else 1
    return first_gpus(torch_device(settings.device), replicas)


def training_gpus(settings: EngineSettings, num_processes: int) -> list[str]:
    """The GPUs of the trainer's processes and of the engine."""
    if settings.cluster != "local":  # Ray places them
        return []
    device = torch_device(settings.device)
    beside = num_trainer_gpus(settings, num_processes, device)
    if beside:
        return first_gpus(device, beside + settings.num_replicas)
    return max(first_gpus(device, num_processes), sampling_gpus(settings), key=len)


def first_gpus(device: torch.device, num: int) -> list[str]:
    """The unique numbers of the first `num` GPUs that this process sees; none on a CPU."""
    if device.type != "cuda":
        return []
    seen = min(num, torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(seen)]


@contextmanager
def held(gpus: Iterable[str]) -> Iterator[None]:
    """Hold the lock of every one of these GPUs, one after the other in the same order everywhere:
    two stages never wait for each other."""
    with ExitStack() as stack:
        for gpu in sorted(set(gpus)):
            stack.enter_context(exclusive(folder() / f"gpu-{gpu}", f"the GPU {gpu}"))
        yield


def folder() -> Path:
    """Where the locks of this machine stand, for all its users: `winnow-locks` in the temporary
    folder, or what WINNOW_LOCKS names."""
    path = Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / "winnow-locks")
    path.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # another user made it
        path.chmod(0o1777)
    return path
