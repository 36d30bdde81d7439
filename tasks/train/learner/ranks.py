"""Data parallel training: the same plan and the same step whatever the number of processes.

Every rank holds the whole policy and its own engine. A step's groups are dealt out to be sampled;
every rank then knows all rollouts, so control, selection and advantages are computed alike
everywhere; the groups are dealt out again for the update, and the gradients of the parts (each
already divided by the whole step's totals) are summed. With one process nothing is communicated.
For parameters that are dealt out, too, see
`sharding`."""

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

LOST_RANK = 75  # the exit status of a rank that lost another (sysexits.h: try again)
BUCKET = 25 * 2**20  # bytes of gradients in a message; what torch's DDP sends too


@dataclass(frozen=True)
class Ranks:
    """This process among the others. `group` is the torch group through which they communicate,
    None for that of all; `timeout` how long any of them may take to answer."""

    rank: int
    size: int
    group: distributed.ProcessGroup | None = None
    timeout: timedelta | None = None

    def beside(self) -> "Ranks":
        """The same processes in a group of their own, so that two threads can communicate at once.
        All of them must ask."""
        if self.size == 1:
            return self
        return replace(self, group=distributed.new_group(backend="gloo", timeout=self.timeout))

    def wait_for_main(self) -> None:
        """Return when rank 0 has come here, which may wait for hours, for a GPU that is in use."""
        if self.size > 1:
            patient = distributed.new_group(backend="gloo", timeout=timedelta(days=365))
            replace(self, group=patient).barrier()
            distributed.destroy_process_group(patient)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the record."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> list[T]:
        """This rank's share of `items`: one in `size`, from its own number on."""
        return list(items[self.rank :: self.size])

    def gather_shards(self, results: list[T], num_items: int) -> list[T]:
        """The results of all ranks in the order of the `num_items` items that were sharded."""
        parts = self.all_gather(results)
        return [parts[i % self.size][i // self.size] for i in range(num_items)]

    def all_gather(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, self.group)
        return values

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.all_gather(None)

    def all_reduce_gradients(self, model: torch.nn.Module, bucket_bytes: int = BUCKET) -> None:
        """Make every rank's gradient the sum over the ranks, a bucket at a time: one message for
        all would need a second copy of every gradient, one each many small messages."""
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
    """`tensors` in their order, in buckets of one dtype of at most `max_bytes`; a larger one is
    alone in its bucket."""
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
    """Become torchrun with `num_processes` processes of `module`, where these are several. The
    processes end with this one."""
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
    """This process among the others, as it was started; it has not met them."""
    environment = os.environ
    rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    return Ranks(rank, size, timeout=timeout)


def join_ranks(device: torch.device, timeout: timedelta, *, always: bool = False) -> Ranks:
    """Join the processes that torchrun started; a process on its own is rank 0 of 1. It makes a
    process group only where one is `always` needed. A collective that takes longer than
    `timeout` raises with gloo; with NCCL torch ends the process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and not always:
        return Ranks(0, 1)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if size == 1:
            distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            distributed.init_process_group(backend, timeout=timeout)
    return Ranks(distributed.get_rank(), size, timeout=timeout)


def is_lost_rank(error: BaseException) -> bool:
    """Whether another rank died, or gave no answer in time. gloo raises plain RuntimeErrors, which
    name the file of its own in which they arose."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def what_was_lost(error: BaseException, ranks: Ranks) -> str:
    """What happened to another rank, of an error for which `is_lost_rank` holds."""
    if ranks.timeout and re.search("timed? ?out", str(error), re.IGNORECASE):
        seconds = f"{ranks.timeout.total_seconds():.0f} s (learner.collective_timeout_seconds)"
        return f"another process of this training gave no answer for {seconds}"
    return "another process of this training died"
