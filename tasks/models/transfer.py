"""Transfers of arrays to a model's device, and of tensors back to the host.

The host fills a queue of work for the GPU in advance. A copy from pageable memory, or a read of a
result, makes the host wait until the queue is empty, and the GPU then waits for the host. So copies
to a GPU use pinned memory, and results are read in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy the array to `device`. The host does not wait for the copy to a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        # torch keeps the pinned copy until the GPU has read it
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of floating point numbers or token ids to main memory, in one transfer. The host
    waits for it."""
    # float64 represents every number of the other formats, and integers below 2**53
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.to(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def index_of(mask_N: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor | slice:
    """Return an index of a mask's True entries: a full slice if all are True, else their positions.
    With the mask as index, a GPU would first count the True entries, and the host would wait."""
    return slice(None) if mask_N.all() else to_device(np.flatnonzero(mask_N), device)
