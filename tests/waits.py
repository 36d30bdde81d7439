"""The number of times that the host waits for its device."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# operations whose value or shape the host must read from the device
READS = {
    aten._local_scalar_dense,  # item, float, bool, if
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,  # by a tensor; by a number it is a separate operation
    aten.unique_dim,
    aten._unique2,
}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Waits(TorchDispatchMode):
    """Record the names of operations on a CPU for which the host would wait on a GPU. Copies from
    the device are not recorded: on a CPU there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket
        masks = args[1] if operation in INDEXED else ()
        is_masked = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if operation in READS or is_masked:
            self.names.append(str(operation))
        return func(*args, **(kwargs or {}))


def num_waits(work: Callable[[], Any], device: torch.device) -> int:
    """Return how often the host waits for a GPU in `work`, as torch reports it, or on a CPU how
    often it would."""
    if device.type != "cuda":
        with Waits() as waits:
            work()
        return len(waits.names)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(one.message) for one in caught)
