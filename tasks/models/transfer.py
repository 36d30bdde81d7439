"""Arrays on their way to a model's device, and tensors on their way back.

A GPU works through a queue that the host fills ahead of it. A copy from ordinary memory, or a read
of a result, makes the host wait until the queue is empty, and the GPU then waits for the host. So
what is copied to a GPU goes through pinned memory, and what is read of it is read in one piece."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on `device`. The host does not wait for the copy to a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        # torch keeps the pinned copy until the GPU has read it
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of floating point numbers or token ids in main memory, by one copy, for which the
    host waits."""
    # float64 holds every number of the other formats, and integers below 2**53
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.to(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def chosen(mask_N: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor | slice:
    """An index of what a mask marks: all of it, or the places. A GPU would count them first, and
    the host wait for the number."""
    return slice(None) if mask_N.all() else to_device(np.flatnonzero(mask_N), device)
