"""The processes of one training, which sample from the same servers."""

from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as distributed

PATIENCE = timedelta(hours=1)  # longer than the time limit for the start of servers
T = TypeVar("T")


def num_trainers() -> int:
    """Return the number of training processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return distributed.get_rank() if distributed.is_initialized() else 0


@cache
def patient_group() -> Any:
    """Return a process group with a long timeout: its collectives wait while the first process
    starts a server, which takes longer than the timeout of training. All processes must create it
    together. If a process dies, the collectives of the others still fail."""
    return distributed.new_group(backend="gloo", timeout=PATIENCE)


def broadcast(value: T, *, is_patient: bool = False) -> T:
    """Return the first training process's value. All processes wait for it. Set `is_patient` if
    the first process may have to start a server before."""
    if num_trainers() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0, group=patient_group() if is_patient else None)
    return values[0]
