"""Groups that were asked for and are not learned from yet, with what is written of them: what
`provision.py` keeps from step to step, and a checkpoint of it."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tasks.train.buffer import REASONS, flat, ragged

NAME = "provision"  # before the array's name, in the names of a checkpoint's tensors
GOING = "abort"  # what engines call the end of a completion that was stopped
KINDS = (GOING, *REASONS)
WRITTEN = ("tokens_N", "logprobs_N", "versions_N")  # of each token, as Row has them


@dataclass
class Row:
    """A rollout as far as it is written, and which version of the policy wrote each token."""

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = GOING


@dataclass
class Group:
    """A group that was asked for and is not learned from yet. `since` is the step in which it was
    in flight first, -1 before that."""

    prompt_row: int
    rows: list[Row]
    since: int = -1

    @property
    def is_whole(self) -> bool:
        return all(row.reason != GOING for row in self.rows)


@dataclass(frozen=True)
class Due:
    """A request of control that no step has taken yet: its groups, where it stands in the plan,
    what replay adds to it, and the share of the run that is done with it."""

    num_groups: int
    pass_number: int
    phase: int
    replayed: int
    progress: float


@dataclass
class Pool:
    """The groups in flight, in the order in which they were asked for, and the requests of which
    they are. `asked` counts the requests so far; `progress` is the share of the run that is done
    with those that steps have taken."""

    groups: list[Group] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
    asked: int = 0
    progress: float = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        """The groups, by the names of a checkpoint's tensors."""
        rows = [row for group in self.groups for row in group.rows]
        arrays = {
            "prompt_rows_G": np.array([group.prompt_row for group in self.groups], np.int64),
            "since_G": np.array([group.since for group in self.groups], np.int64),
            "sizes_G": np.array([len(group.rows) for group in self.groups], np.int64),
            "seeds_B": np.array([row.seed for row in rows], np.int64),
            "lengths_B": np.array([len(row.token_ids) for row in rows], np.int64),
            "reasons_B": np.array([KINDS.index(row.reason) for row in rows], np.int64),
            "tokens_N": flat([row.token_ids for row in rows], np.int64),
            "logprobs_N": flat([row.logprobs for row in rows], np.float64),
            "versions_N": flat([row.versions for row in rows], np.int64),
        }
        return {f"{NAME}.{name}": torch.from_numpy(array) for name, array in arrays.items()}

    def numbers(self) -> dict[str, Any]:
        """What else is to be known of them, as JSON has it."""
        return {
            "asked": self.asked,
            "progress": self.progress,
            "due": [vars(due) for due in self.due],
        }

    def fill(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """The inverse of `tensors` and `numbers`."""
        arrays = {
            name.removeprefix(f"{NAME}."): tensor.numpy()
            for name, tensor in tensors.items()
            if name.startswith(f"{NAME}.")
        }
        of_rows = zip(
            arrays["seeds_B"].tolist(),
            *(ragged(arrays[name], arrays["lengths_B"]) for name in WRITTEN),
            [KINDS[kind] for kind in arrays["reasons_B"].tolist()],
            strict=True,
        )
        rows = itertools.starmap(Row, of_rows)
        of_groups = (arrays[name].tolist() for name in ("prompt_rows_G", "sizes_G", "since_G"))
        self.groups = [
            Group(prompt_row, list(itertools.islice(rows, size)), since)
            for prompt_row, size, since in zip(*of_groups, strict=True)
        ]
        self.due = [Due(**due) for due in numbers["due"]]
        self.asked, self.progress = numbers["asked"], numbers["progress"]
