"""The processes that train together and sample from the same servers."""

from typing import TypeVar

import torch.distributed as distributed

T = TypeVar("T")


def num_askers() -> int:
    """How many they are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """This process among them."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def broadcast(value: T) -> T:
    """The value that the first of the training processes has; all wait for it."""
    if num_askers() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def keep_waiting() -> None:
    """While the first process waits for a server to start, have the others, which are in `agree`,
    wait on. They would take it for silent otherwise."""
    told: list[None] = []
    broadcast(told)


def agree(value: T) -> T:
    """As `broadcast`, where the first process may have waited for a server to start."""
    while not (found := broadcast([value])):
        pass
    return found[0]
