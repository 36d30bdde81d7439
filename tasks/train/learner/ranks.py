"""Data parallel training: the same plan and, without `train.over_provision`, the same step for any
number of processes.

Every rank has the whole policy and its own engine. A step's groups are distributed for sampling.
Then every rank gets all rollouts, so every rank computes the same requests, selection and
advantages. The rollouts are distributed again for the update, by tokens (`balance`), and the
gradients of the parts (each already divided by the whole step's totals) are summed. With one
process there is no communication. For sharded parameters see `tasks.models.sharding`."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import HashStore

T = TypeVar("T")

LOST_RANK = 75  # exit status of a rank that lost another (sysexits.h: try again)
BUCKET = 25 * 2**20  # bytes of gradients in a message, as in torch's DDP


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks. `group` is the torch process group of their communication, None
    for the default group; `timeout` limits the wait for any rank."""

    rank: int
    size: int
    group: distributed.ProcessGroup | None = None
    timeout: timedelta | None = None

    def beside(self) -> "Ranks":
        """Return the same processes in a separate group, so that two threads can communicate at
        once. All of them must call this."""
        if self.size == 1:
            return self
        return replace(self, group=distributed.new_group(backend="gloo", timeout=self.timeout))

    def wait_for_main(self) -> None:
        """Wait until rank 0 calls this, perhaps for hours, since rank 0 may first wait for GPUs."""
        if self.size > 1:
            patient = distributed.new_group(backend="gloo", timeout=timedelta(days=365))
            replace(self, group=patient).barrier()
            distributed.destroy_process_group(patient)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and the record."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this rank's share of `items`: every `size`-th, starting at its rank."""
        return list(items[self.rank :: self.size])

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, self.group)
        return values

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        self.all_gather(None)

    def all_reduce_gradients(self, model: torch.nn.Module, bucket_bytes: int = BUCKET) -> None:
        """Sum every gradient over the ranks, in buckets: a single message would need a second copy
        of all gradients, and one message per gradient would be many small ones."""
        if self.size == 1:
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # a rank without a micro-batch has no gradients, and must still take part
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in buckets(gradients, bucket_bytes):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                distributed.all_reduce(bucket[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def buckets(tensors: Sequence[torch.Tensor], max_bytes: int) -> list[list[torch.Tensor]]:
    """Return `tensors` in their order, in buckets of one dtype of at most `max_bytes`; a larger
    tensor is alone in its bucket."""
    found: list[list[torch.Tensor]] = []
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.get(tensor.dtype, [])
        if not bucket or sum(t.nbytes for t in bucket) + tensor.nbytes > max_bytes:
            bucket = open_buckets[tensor.dtype] = []
            found.append(bucket)
        bucket.append(tensor)
    return found


def launch_ranks(module: str, arguments: list[str], num_processes: int) -> None:
    """Replace this process with torchrun, which runs `num_processes` processes of `module`; do
    nothing if the number is 1. The processes stop when this one stops."""
    if num_processes == 1:
        return
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
    ]
    os.execv(sys.executable, [*launcher, "-m", module, *arguments])


def announced_ranks(timeout: timedelta) -> Ranks:
    """Return this process's rank and the number of ranks, from the environment; do not connect."""
    environment = os.environ
    rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    return Ranks(rank, size, timeout=timeout)


def join_ranks(device: torch.device, timeout: timedelta, *, always: bool = False) -> Ranks:
    """Join the processes that torchrun started; a single process is rank 0 of 1, and gets a process
    group only with `always`. A collective that takes longer than `timeout` raises an error with
    gloo; with NCCL, torch kills the process."""
    ranks = announced_ranks(timeout)
    if ranks.size == 1 and not always:
        return ranks
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if ranks.size == 1:
            distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            distributed.init_process_group(backend, timeout=timeout)
    return ranks


def is_lost_rank(error: BaseException) -> bool:
    """Return whether another rank died, or did not respond in time. gloo raises plain
    RuntimeErrors; their text contains the path of a gloo source file."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def rank_failure(error: BaseException, ranks: Ranks) -> str:
    """Return a description of another rank's failure, for an error with `is_lost_rank(error)`."""
    if ranks.timeout and re.search("timed? ?out", str(error), re.IGNORECASE):
        seconds = f"{ranks.timeout.total_seconds():.0f} s (learner.collective_timeout_seconds)"
        return f"another process of this training did not respond for {seconds}"
    return "another process of this training died"
