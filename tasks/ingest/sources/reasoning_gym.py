"""Problems from the library reasoning-gym (arXiv 2505.24760), with several tasks mixed by weight.

A task's `config` is passed to the library and sets the difficulty (`min_terms`, `max_terms`, ...).
Its `level` is the key of the problem's metadata that becomes the column `level`. With the verifier
`reasoning_gym`, the library's own scorer, the gold is the whole problem. Tasks are generated one
after the other; splitting mixes them."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tasks.common.params import ParamsError, unknown
from tasks.grading.verifiers.reasoning_gym import gold
from tasks.ingest.candidates import Candidate
from tasks.ingest.files.formats import Record
from tasks.ingest.splits import parts

MAX_SEED = 2**31
"""Training examples of the tiny policy use seeds from 2^40 on; seeds here stay below that."""


@dataclass(frozen=True)
class Task:
    """One of the library's tasks. `level` is a key of its problems' metadata, or null."""

    name: str
    weight: float
    config: dict[str, Any]
    level: str | None
    verifier: str

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            what = f"ingest: task {self.name!r} is unknown; reasoning_gym has"
            raise ParamsError(unknown(what, self.name, sorted(DATASETS)))


@dataclass(frozen=True)
class Settings:
    """`num_prompts` is the number of problems to generate. Easy tasks produce duplicates, so
    generate more than the splits need."""

    seed: int
    num_prompts: int
    tasks: list[Task]


def read(settings: Settings) -> Iterator[Record]:
    """Yield `num_prompts` problems, task after task, with each task's share by weight."""
    for index, (task, share) in enumerate(zip(settings.tasks, shares(settings), strict=True)):
        seed = random.Random(f"{settings.seed}/{index}/{task.name}").randrange(MAX_SEED)
        for line, problem in enumerate(dataset(task, seed, share) if share > 0 else (), 1):
            content = json.dumps(problem, ensure_ascii=False, default=str)
            yield Record(line, content, {**problem, "task": task})


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one problem."""
    problem: dict[str, Any] = dict(record.fields)
    task: Task = problem.pop("task")
    level = problem["metadata"].get(task.level) if task.level else None
    answer = gold(task.name, problem) if task.verifier == "reasoning_gym" else problem["answer"]
    source = f"reasoning_gym/{task.name}"
    return Candidate(problem["question"], answer, task.verifier, level, source=source)


def shares(settings: Settings) -> list[int]:
    """Return the number of problems of each task; they sum to `num_prompts`."""
    weights = dict(enumerate(task.weight for task in settings.tasks))
    if not weights or min(weights.values()) < 0 or sum(weights.values()) == 0:
        raise ParamsError("reasoning_gym needs tasks whose weights are not negative and not all 0")
    return list(parts(settings.num_prompts, weights).values())


def dataset(task: Task, seed: int, size: int) -> Any:
    """Return the library's generator. Raise ParamsError for a config that the library rejects."""
    try:
        return reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.config)
    except (TypeError, AssertionError, ValueError) as error:
        fields = DATASETS[task.name][1].__dataclass_fields__
        allowed = [key for key in fields if key not in ("seed", "size")]
        raise ParamsError(
            f"reasoning_gym task {task.name}: config {task.config}: {error}; allowed: "
            f"{', '.join(allowed)}"
        ) from error
