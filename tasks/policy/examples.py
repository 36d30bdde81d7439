"""Training text of the tiny policy: pairs (prompt, completion) from one or more families, mixed by
weight.

Seeds start at 2^40. Prompts that `ingest` generates use smaller seeds, so no example here has the
seed of an evaluation prompt."""

import random
from collections.abc import Iterator
from typing import Any

from tasks.common import registry
from tasks.common.params import ParamsError, gathered, parse
from tasks.policy import families
from tasks.policy.settings import Family

FIRST_SEED = 2**40
SEEDS_PER_POLICY = 2**32


def load(family: Family) -> Any:
    """Return the module of a family. Raise ParamsError with a list of families if it is unknown."""
    return registry.load(families, family.name, "policy.tiny.families: the name")


def phrases(chosen: list[Family]) -> list[str]:
    """Return the fixed phrases of the families. Each phrase becomes one token."""
    return [phrase for family in chosen for phrase in load(family).PHRASES]


def settings_of(chosen: list[Family]) -> list[Any]:
    """Return the parsed settings of every family. Raise ParamsError if any is invalid."""
    if not chosen or min(family.weight for family in chosen) <= 0:
        raise ParamsError(
            "policy.tiny.families needs at least one family, each with a weight above 0"
        )
    with gathered() as problems:
        return [
            problems.of(
                parse,
                family.settings,
                load(family).Settings,
                f"policy.tiny.families.{family.name}.settings",
            )
            for family in chosen
        ]


def draw(
    chosen: list[Family], seed: int, num_examples: int, first_chunk: int = 0
) -> Iterator[list[tuple[str, str]]]:
    """Yield chunks of about `num_examples` shuffled pairs (prompt, completion), without end, from
    the chunk with index `first_chunk` on."""
    modules, settings = [load(family) for family in chosen], settings_of(chosen)
    total = sum(family.weight for family in chosen)
    per_chunk = num_examples + len(chosen)  # seeds; every family draws at least one example
    first = FIRST_SEED + seed * SEEDS_PER_POLICY + first_chunk * per_chunk
    while True:
        chunk: list[tuple[str, str]] = []
        for family, module, setting in zip(chosen, modules, settings, strict=True):
            chunk += module.examples(
                setting, first, max(1, round(num_examples * family.weight / total))
            )
        random.Random(first).shuffle(chunk)
        first += per_chunk
        yield chunk
