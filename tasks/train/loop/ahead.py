"""Batches that were sampled and not yet learned from: what a checkpoint keeps of them.

Their completions are kept, and graded again when a run goes on: texts and scores come from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from tasks.train.buffer import Buffer
from tasks.train.loop.batch import Batch
from tasks.train.loop.collect import Collector, Cost
from tasks.train.rollouts import GroupRequest, Prompts, Rollouts

NAME = (
    "ahead"  # before a batch's place and the array's name, in the names of a checkpoint's tensors
)


@dataclass(frozen=True)
class Ahead:
    """The batches that come next, and the share of the run that is done without them."""

    batches: list[Batch]
    progress: float

    def tensors(self) -> dict[str, torch.Tensor]:
        """The batches' rollouts, by the names of a checkpoint's tensors."""
        found = {}
        for place, batch in enumerate(self.batches):
            kept = Buffer.of(batch.fresh)
            for field in fields(kept):
                array = getattr(kept, field.name)
                found[f"{NAME}.{place}.{field.name}"] = torch.from_numpy(array)
        return found

    def numbers(self) -> dict[str, Any]:
        """What else is to be known of them, as JSON has it."""
        return {
            "progress": self.progress,
            "batches": [
                {
                    "pass": batch.request.pass_number,
                    "phase": batch.request.phase,
                    "replayed": batch.replayed,
                    "costs": [asdict(cost) for cost in batch.costs],
                    "judged_flops": batch.judged_flops,
                    "seconds": batch.seconds,
                    "progress": batch.progress,
                }
                for batch in self.batches
            ],
        }


def read_ahead(
    collector: Collector,
    prompts: Prompts,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
) -> Ahead:
    """The inverse of `Ahead.tensors` and `Ahead.numbers`."""
    batches = []
    for place, known in enumerate(numbers["batches"]):
        names = [field.name for field in fields(Buffer)]
        kept = Buffer(*(tensors[f"{NAME}.{place}.{name}"].numpy() for name in names))
        request = GroupRequest(kept.prompt_rows_G, kept.sizes_G, known["pass"], known["phase"])
        batches.append(
            Batch(
                request,
                graded(collector, prompts, kept.rollouts()),
                known["replayed"],
                [Cost(**cost) for cost in known["costs"]],
                known["judged_flops"],
                known["seconds"],
                known["progress"],
            )
        )
    collector.take_judged()  # it stands in the batch that was judged first
    return Ahead(batches, numbers["progress"])


def graded(collector: Collector, prompts: Prompts, rollouts: Rollouts) -> Rollouts:
    """Kept rollouts as fresh ones, with their texts and verdicts."""
    is_action = None if rollouts.is_action_N is None else rollouts.is_action_B()
    samples = replace(rollouts.samples, is_action=is_action)
    rows_B = rollouts.prompt_rows_Q[rollouts.group_B]
    texts, verdicts = collector.grade(prompts, rows_B, samples)
    return replace(
        rollouts,
        texts=texts,
        outcomes=[verdict.outcome for verdict in verdicts],
        rewards_B=np.array([verdict.reward for verdict in verdicts]),
        scores=[dict(verdict.parts) for verdict in verdicts],
        replayed_B=np.zeros(len(rows_B), dtype=np.bool_),
    )


def num_a_round(max_staleness: int) -> int:
    """How many batches are sampled from one policy, when the last of as many before them and of
    these themselves may be `max_staleness` steps old when it is learned from."""
    return (max_staleness + 1) // 2


def staleness(version: int, batch: Batch) -> int:
    """By how many updates the oldest token of a batch is older than this version of the policy. Of
    tokens that other sampling settings wrote the version is not known."""
    versions = batch.fresh.versions_B
    return version - int(versions[versions >= 0].min(initial=version))


def mean_staleness(version: int, batch: Batch) -> float:
    """By how many updates the tokens of a batch are older on average."""
    versions = batch.fresh.token_versions_N()
    known = versions[versions >= 0]
    return float(version - known.mean()) if len(known) else 0.0


def ages(version: int, batch: Batch) -> dict[str, float]:
    """Both, for the record."""
    oldest, mean = staleness(version, batch), mean_staleness(version, batch)
    return {"staleness": float(oldest), "staleness_mean": mean}
