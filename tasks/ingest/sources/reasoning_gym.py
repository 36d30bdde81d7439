"""Problems from the library reasoning-gym (arXiv 2505.24760), several of its tasks mixed by weight.

A task's `config` is the library's own and sets the difficulty (`min_terms`, `max_terms`, ...). Its
`level` is the key of the problem's metadata that becomes the column `level`. With the verifier
`reasoning_gym`, the library's own scorer, the gold is the whole problem. Tasks follow each other;
splitting mixes them."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tasks.common.params import ParamsError
from tasks.grading.verifiers.reasoning_gym import gold
from tasks.ingest.candidates import Candidate, Rejection

MAX_SEED = 2**31
"""The tiny policy's training examples are drawn with seeds from 2^40 on; these stay below."""


@dataclass(frozen=True)
class Task:
    """One of the library's tasks. `level` is a key of its problems' metadata, or null."""

    name: str
    weight: float
    config: dict[str, Any]
    level: str | None
    verifier: str


@dataclass(frozen=True)
class Settings:
    """`num_prompts` problems are generated. Small problems repeat, so generate more than the splits
    need."""

    seed: int
    num_prompts: int
    tasks: list[Task]


def read(settings: Settings) -> Iterator[Candidate | Rejection]:
    """Yield `num_prompts` problems, each task's share by its weight, task after task."""
    for index, (task, share) in enumerate(zip(settings.tasks, shares(settings), strict=True)):
        if share > 0:
            seed = random.Random(f"{settings.seed}/{index}/{task.name}").randrange(MAX_SEED)
            yield from problems(task, seed, share)


def shares(settings: Settings) -> list[int]:
    """Return the number of problems of each task; they sum to `num_prompts`."""
    weights = [task.weight for task in settings.tasks]
    if not weights or min(weights) < 0 or sum(weights) == 0:
        raise ParamsError("reasoning_gym needs tasks whose weights are not negative and not all 0")
    ends = [
        round(settings.num_prompts * sum(weights[: i + 1]) / sum(weights))
        for i in range(len(weights))
    ]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def problems(task: Task, seed: int, size: int) -> Iterator[Candidate]:
    """Yield `size` problems of a task."""
    for line, problem in enumerate(dataset(task, seed, size), 1):
        level = problem["metadata"].get(task.level) if task.level else None
        content = json.dumps(problem, ensure_ascii=False, default=str)
        source = f"reasoning_gym/{task.name}"
        answer = gold(task.name, problem) if task.verifier == "reasoning_gym" else problem["answer"]
        yield Candidate(source, line, content, problem["question"], answer, task.verifier, level)


def dataset(task: Task, seed: int, size: int) -> Any:
    """Return the library's generator. Raises ParamsError naming a task, or a key of its config,
    that the library does not have."""
    if task.name not in DATASETS:
        raise ParamsError(
            f"reasoning_gym has no task '{task.name}'; it has: {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.config)
    except (TypeError, AssertionError, ValueError) as error:
        allowed = [
            key
            for key in DATASETS[task.name][1].__dataclass_fields__
            if key not in ("seed", "size")
        ]
        raise ParamsError(
            f"reasoning_gym task {task.name}: config {task.config}: {error}; allowed: "
            f"{', '.join(allowed)}"
        ) from error
