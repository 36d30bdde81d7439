"""A substitute for a group of NCCL on a CPU: tensors are sent through files.

vLLM's servers import this module by the option `--worker-extension-cls`."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.patience import wait_for

FOLDER = "WINNOW_TEST_GROUP"


class FileGroup:
    """A member of the group `unique_id`. It waits for all other members."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        self.folder = Path(os.environ[FOLDER]) / unique_id.hex()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.sent = rank, 0
        (self.folder / f"rank-{rank}").touch()
        for other in range(size):
            wait_for((self.folder / f"rank-{other}").exists)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        path = self.folder / f"{self.sent}.bin"
        self.sent += 1
        if self.rank == src:
            unfinished = path.with_suffix(".new")
            unfinished.write_bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
            unfinished.rename(path)
        else:
            wait_for(path.exists)
            found = torch.frombuffer(bytearray(path.read_bytes()), dtype=tensor.dtype)
            tensor.copy_(found.view(tensor.shape))

    def destroy(self) -> None:
        (self.folder / f"left-{self.rank}").touch()


class Extension:
    """The class for vLLM's option."""


def stand_in() -> None:
    """Replace NCCL in a server by this group, and CUDA's streams by nothing."""
    from vllm.distributed.device_communicators import pynccl

    def join(unique_id: bytes, rank: int, world_size: int, device: Any) -> FileGroup:
        return FileGroup(unique_id, rank, world_size)

    pynccl.PyNcclCommunicator.from_unique_id_bytes = join
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
    torch.accelerator.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0


if "VLLM_SERVER_DEV_MODE" in os.environ:
    stand_in()
