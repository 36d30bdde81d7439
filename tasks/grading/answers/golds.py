"""Golds with more than one answer, or with a tolerance: JSON text in the column `answer`.

- `{"any": ["1/2", "0.5"]}`: one of them is enough.
- `{"all": ["1", "-3"]}`: the completion must contain all of them and no other, in any order.
- `{"answer": "3.14", "tolerance": 0.01}`: the allowed absolute error of numbers;
  `relative_tolerance` is relative to the gold instead. Either may also accompany `any` or `all`.

Any other text is a single answer, exact unless the verifier has a tolerance (`numeric`, `math`)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from tasks.grading.answers.numbers import EXACT, Tolerance

KINDS = {"any", "all", "answer"}
Right = TypeVar("Right")
Given = TypeVar("Given")
TOLERANCES = {"tolerance", "relative_tolerance"}


@dataclass(frozen=True)
class Gold:
    """The correct answers, whether all of them are required, and the tolerance for numbers."""

    answers: tuple[str, ...]
    all_of_them: bool = False
    tolerance: Tolerance = EXACT


@lru_cache(maxsize=4096)
def read_gold(answer: str, relative_tolerance: float | None = None) -> Gold:
    """Return the gold in the column `answer`, with the verifier's `relative_tolerance` unless the
    JSON sets a tolerance. Raise ValueError for an empty answer in JSON or an invalid tolerance."""
    tolerance = Tolerance(relative=checked(relative_tolerance or 0.0, answer))
    found = form_of(answer)
    if found is None:
        return Gold((answer,), tolerance=tolerance)
    if "tolerance" in found:
        tolerance = Tolerance(absolute=checked(found["tolerance"], answer))
    elif "relative_tolerance" in found:
        tolerance = Tolerance(relative=checked(found["relative_tolerance"], answer))
    [kind] = KINDS & set(found)
    answers = [found[kind]] if kind == "answer" else found[kind]
    return Gold(texts(answers, answer), kind == "all", tolerance)


def form_of(answer: str) -> dict[str, Any] | None:
    """Parse a gold in one of the JSON forms. Return None for other text, such as `{1, 2}`."""
    if not answer.lstrip().startswith('{"'):
        return None
    try:
        found = json.loads(answer, parse_float=str, parse_int=str)  # all digits
    except ValueError:
        return None
    if not isinstance(found, dict) or len(found) > 2 or len(KINDS & set(found)) != 1:
        return None
    return found if set(found) <= KINDS | TOLERANCES else None


def texts(answers: Any, where: str) -> tuple[str, ...]:
    """Return the answers as texts. Raise ValueError for an empty list or answer."""
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"the gold {where[:80]!r} must list at least one answer")
    found = tuple(str(answer).strip() for answer in answers)
    if not all(found):
        raise ValueError(f"the gold {where[:80]!r} has an empty answer")
    return found


def checked(tolerance: Any, where: str) -> float:
    """Return a tolerance as a finite number of 0 or more. Raise ValueError for other values."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float | str):
        raise ValueError(f"the gold {where[:80]!r} has a tolerance that is not a number")
    number = float(tolerance)
    if not 0 <= number < float("inf"):
        raise ValueError(f"the gold {where[:80]!r} has a tolerance of {tolerance}")
    return number


def pairs_up(
    golds: Sequence[Right], given: Sequence[Given], same: Callable[[Right, Given], bool | None]
) -> bool:
    """Return whether golds and given values match one to one. Equality within a tolerance is not
    transitive, so a value may have to be reassigned along an augmenting path (Kuhn's bipartite
    matching)."""
    if len(golds) != len(given):
        return False
    taken: dict[int, int] = {}  # index of a given value -> index of its gold
    equal: dict[tuple[int, int], bool] = {}

    def is_same(gold: int, place: int) -> bool:
        if (gold, place) not in equal:
            equal[gold, place] = bool(same(golds[gold], given[place]))
        return equal[gold, place]

    def assign(gold: int, seen: set[int]) -> bool:
        for place in range(len(given)):
            if place in seen or not is_same(gold, place):
                continue
            seen.add(place)
            if place not in taken or assign(taken[place], seen):
                taken[place] = gold
                return True
        return False

    return all(assign(gold, set()) for gold in range(len(golds)))
