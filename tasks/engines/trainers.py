"""Communication between the processes of one training run, which sample from the same servers."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch.distributed as distributed

BEAT_SECONDS = 0.5
T = TypeVar("T")


def num_trainers() -> int:
    """Return the number of training processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return distributed.get_rank() if distributed.is_initialized() else 0


@cache
def beating_group() -> Any:
    """Return a process group for broadcasts with `is_patient`. Its timeout is the training group's.
    All processes must make the first call together."""
    world: Any = distributed.group.WORLD
    return distributed.new_group(backend="gloo", timeout=world.get_group_store().timeout)


@contextmanager
def others_waiting() -> Iterator[None]:
    """Let the other processes wait in a patient `broadcast` until the first process has left this
    block. A thread sends them heartbeats: if the first process is stopped or dies, the
    others fail after the training group's timeout; if another dies, this block fails at its end."""
    if num_trainers() == 1 or rank() > 0:
        yield
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_SECONDS):
            distributed.broadcast_object_list([False, None], src=0, group=beating_group())

    with ThreadPoolExecutor(1) as pool:
        beats = pool.submit(beat)
        try:
            yield
        finally:
            done.set()
    beats.result()


def gather(value: T) -> list[T]:
    """Return every training process's value, in order of rank. All processes must call this."""
    if num_trainers() == 1:
        return [value]
    found: list[Any] = [None] * num_trainers()
    distributed.all_gather_object(found, value)
    return found


def broadcast(value: T, *, is_patient: bool = False) -> T:
    """Return the first training process's value. All processes must call this. Set `is_patient` if
    the others may have to wait while the first starts a server, in an `others_waiting` block."""
    if num_trainers() == 1:
        return value
    found: list[Any] = [False, None]
    while not found[0]:
        found = [True, value]
        group = beating_group() if is_patient else None
        distributed.broadcast_object_list(found, src=0, group=group)
    received: T = found[1]
    return received
