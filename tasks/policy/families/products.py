"""Worked examples of reasoning_gym's `products`, imperfect on purpose.

The completion is either worked, place by place with a running total (`12 * 34` -> ` 10*30=300+
10*4=340+2*30=400+2*4=408`, one product of two terms after the other), or direct, only the answer.
Worked completions are several times as long as their prompts, as with reasoning models.

Left out: removing evaluation problems, as for `chain_sum`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym

PHRASES = (
    "Solve the following multiplication:",
    ". Give only the result as your final answer.",
)


@dataclass(frozen=True)
class Settings:
    """reasoning_gym's config, and the quality of the examples.

    `direct_rate` is the share of direct answers; `step_error_rate` is the probability that a
    partial product is slightly wrong."""

    config: dict[str, Any]
    direct_rate: float
    step_error_rate: float


def examples(settings: Settings, seed: int, num_examples: int) -> Iterator[tuple[str, str]]:
    """Yield `num_examples` pairs (prompt, completion). Equal arguments yield equal pairs."""
    rng = random.Random(seed)
    problems = reasoning_gym.create_dataset(
        "products", seed=seed, size=num_examples, **settings.config
    )
    for problem in problems:
        direct = rng.random() < settings.direct_rate
        expression = problem["metadata"]["expression"]
        answer = problem["answer"] if direct else worked(expression, settings.step_error_rate, rng)
        yield problem["question"], f" {answer}"


def worked(expression: str, step_error_rate: float, rng: random.Random) -> str:
    """Return `12 * 34` as `10*30=300+10*4=340+2*30=400+2*4=408`. After a semicolon, a further
    factor multiplies the total. A wrong partial product is off by 1 or 10, and later sums include
    the error."""
    first, *rest = (int(term) for term in expression.split(" * "))
    total, products = first, []
    for factor in rest:
        text, places, total = "", places_of(total), 0
        for left in places:
            for right in places_of(factor):
                slip = rng.choice((-10, -1, 1, 10)) if rng.random() < step_error_rate else 0
                total += left * right + slip
                text += f"{'+' if text else ''}{left}*{right}={total}"
        products.append(text)
    return ";".join(products)


def places_of(number: int) -> list[int]:
    """Return 304 as [300, 4], -34 as [-30, -4], and 0 as [0]."""
    digits, sign = str(abs(number)), -1 if number < 0 else 1
    values = [int(d) * 10 ** (len(digits) - 1 - place) for place, d in enumerate(digits)]
    return [sign * value for value in values if value] or [0]
