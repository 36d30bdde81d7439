"""Updates of the whole policy, of adapters, and of a policy sharded over one process (FSDP2):
seconds, peak memory, the change of the parameters, and the distance of the sharded ones from the
whole ones as a share of that change. Norms are rounded in layers that are gathered in bfloat16, and
Adam moves a parameter with a tiny gradient in either direction. So shares are of tensor means."""

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed

from tasks.models.settings import Lora
from tasks.models.weights import whole
from tasks.train.learner.learner import Learner
from tasks.train.learner.ranks import join_ranks
from tests.gpu.check.parts.update import (
    allocated,
    free,
    make_learner,
    peak,
    rollouts_of,
    update,
)
from tests.gpu.check.shapes import Sizes, make_model, seconds_of

RATE = 1e-3  # large, so that different updates become visible
LORA = Lora(rank=16, alpha=32.0, modules=["all-linear"], base_bits=32)


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    for shape in sizes.shapes:
        kept: dict[str, torch.Tensor] = {}
        start = make_model(shape, torch.float32, torch.device("cpu"))
        before = {n: p.detach() for n, p in start.named_parameters()}
        for name in ("whole", "fsdp2", "adapters"):
            learner, row = train(shape, name, sizes)
            if name == "whole":
                kept = tensors_of(learner)
                changes = [(kept[name] - before[name]).abs().max() for name in before]
                row["largest change"] = max(map(float, changes))
            if name == "fsdp2":
                row["largest share"] = largest_share(tensors_of(learner), kept, before)
            yield row
            del learner
            free(sizes)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def tensors_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Return the whole parameters on the CPU."""
    return {n: whole(p).detach().cpu().clone() for n, p in learner.model.named_parameters()}


def largest_share(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> float:
    """Return the largest ratio over tensors of the mean distance of `one` from `other` and the mean
    change of `other`."""
    distances = {n: float((one[n] - other[n]).abs().mean()) for n in other}
    return max(d / float((other[n] - before[n]).abs().mean()) for n, d in distances.items())


def train(shape: str, name: str, sizes: Sizes) -> tuple[Learner, dict[str, Any]]:
    """Return a learner after some updates, and their row."""
    before = allocated(sizes)
    if name == "fsdp2":
        ranks = join_ranks(sizes.device, timedelta(minutes=5), always=True)
        learner = make_learner(shape, sizes, shard="fsdp2")
        learner.ranks = dataclasses.replace(ranks)
    else:
        learner = make_learner(shape, sizes, lora=LORA if name == "adapters" else None)
    rollouts = rollouts_of(learner, sizes.lengths[1], 512 if sizes.is_small else 16_384)

    def updates(number: int) -> None:
        for _ in range(number):
            update(learner, rollouts, RATE)

    updates(1)
    seconds = seconds_of(lambda: updates(sizes.repeats), sizes.device)
    row = {
        "model": shape,
        "trained": name,
        "seconds an update": seconds / sizes.repeats,
        **peak(learner, before, sizes),
    }
    return learner, row
