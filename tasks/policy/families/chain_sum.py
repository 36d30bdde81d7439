"""Worked examples of reasoning_gym's `chain_sum`, imperfect on purpose.

The completion is either worked, step by step with the answer last (`4 + 3 - 9 =` -> ` 4+3=7-9=-2`),
or direct, only the answer (` -2`). A small model can compute single steps, but not long sums at
once. A policy learns both ways, with more direct answers for long problems and some wrong steps, so
it solves a problem only sometimes. Reinforcement learning can then discover that working step by
step is better.

Left out: removing evaluation problems. Seeds are disjoint (see `tasks.policy.examples`), but a
short problem such as `4 + 3 =` can recur by chance, as in any corpus. Short problems are the easy
end of the pass rates."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym

PHRASES = ("State the final answer to the following arithmetic problem:",)


@dataclass(frozen=True)
class Settings:
    """reasoning_gym's config, and the quality of the examples.

    `direct_rate_shortest` and `direct_rate_longest` are the shares of direct answers at the fewest
    and at the most terms of `config`, linear in between; `step_error_rate` is the probability that
    a step is slightly wrong."""

    config: dict[str, Any]
    direct_rate_shortest: float
    direct_rate_longest: float
    step_error_rate: float


def examples(settings: Settings, seed: int, num_examples: int) -> Iterator[tuple[str, str]]:
    """Yield `num_examples` pairs (prompt, completion). Equal arguments yield equal pairs."""
    rng = random.Random(seed)
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=num_examples, **settings.config
    )
    low, high = problems.config.min_terms, problems.config.max_terms
    for problem in problems:
        expression = problem["metadata"]["expression"]
        share = (problem["metadata"]["num_terms"] - low) / max(high - low, 1)
        rate = settings.direct_rate_shortest + share * (
            settings.direct_rate_longest - settings.direct_rate_shortest
        )
        direct = rng.random() < rate
        answer = problem["answer"] if direct else worked(expression, settings.step_error_rate, rng)
        yield problem["question"], f" {answer}"


def worked(expression: str, step_error_rate: float, rng: random.Random) -> str:
    """Return `4 + 3 - 9` as `4+3=7-9=-2`. A wrong step is off by 1 or 10, and the next step builds
    on it."""
    first, *rest = expression.split()
    total, text = int(first), first
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        slip = rng.choice((-10, -1, 1, 10)) if rng.random() < step_error_rate else 0
        total += int(term) * (1 if sign == "+" else -1) + slip
        text += f"{sign}{term}={total}"
    return text
