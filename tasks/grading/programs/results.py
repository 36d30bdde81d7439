"""Results of programs: decoded from the sandbox's replies, and compared with the expected results.

A program can write replies of any form, and its values can be of any size. Callers of `decoded` and
`same_result` must therefore catch any Exception."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# unambiguous, to match in linear time: outputs can be long
NUMBER = re.compile(r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?")
MAX_SHOWN = 80  # characters of a result in a verdict


def same_output(given: str, expected: str, tolerance: float | None) -> bool:
    """Return whether two outputs are the same line by line, ignoring white space at the ends of
    lines and empty lines at the end. With a tolerance, lines are compared word by word, and numbers
    by their values."""
    lines, others = trimmed(given), trimmed(expected)
    return len(lines) == len(others) and all(
        a == b or (tolerance is not None and same_words(a, b, tolerance))
        for a, b in zip(lines, others, strict=True)
    )


def trimmed(text: str) -> list[str]:
    """Return the lines of an output without trailing white space or empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_words(given: str, expected: str, tolerance: float) -> bool:
    """Return whether two lines have the same words, where numbers may differ by the tolerance."""
    words, others = given.split(), expected.split()
    return len(words) == len(others) and all(
        a == b or same_number(a, b, tolerance) for a, b in zip(words, others, strict=True)
    )


def same_number(given: str, expected: str, tolerance: float) -> bool:
    """Return whether two words are numbers that differ by at most the tolerance (see `close`)."""
    if not NUMBER.fullmatch(given) or not NUMBER.fullmatch(expected):
        return False
    return close(float(given), float(expected), tolerance)


def close(given: float, expected: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most the tolerance, relative or absolute."""
    try:
        return math.isclose(given, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer too large for a float
        return given == expected


def same_result(given: Any, expected: Any, wrapped: bool, tolerance: float | None) -> bool:
    """Return whether a function returned the expected value. If `wrapped`, it may also return the
    first element of an expected list."""
    value = plain(given)
    if same_value(value, expected, tolerance):
        return True
    if not (wrapped and isinstance(expected, list) and expected):
        return False
    return same_value(value, expected[0], tolerance)


def same_value(given: Any, expected: Any, tolerance: float | None) -> bool:
    """Return whether two JSON values are equal; numbers may differ by the tolerance, if any."""
    if isinstance(given, list) and isinstance(expected, list):
        pairs = zip(given, expected, strict=False)
        return len(given) == len(expected) and all(same_value(*pair, tolerance) for pair in pairs)
    if isinstance(given, dict) and isinstance(expected, dict):
        same_keys = given.keys() == expected.keys()
        return same_keys and all(same_value(given[key], expected[key], tolerance) for key in given)
    if tolerance is not None and is_number(given) and is_number(expected):
        return close(given, expected, tolerance)
    return bool(given == expected)


def is_number(value: Any) -> bool:
    """Return whether a value is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def decoded(value: Any) -> Any:
    """Return the value encoded by `runner.encoded`. Raise ValueError or TypeError for any other
    form, OverflowError for too large a complex number, RecursionError for too deep a value."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("a result in no known form")
    [(kind, content)] = value.items()
    if kind in ("tuple", "set", "frozenset"):
        items: Iterable[Any] = [decoded(item) for item in content]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in content}
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "other":
        return Other(str(content))
    raise ValueError("a result in no known form")


@dataclass(frozen=True, eq=False)
class Other:
    """A result of a type that is not transferred from the sandbox. It equals nothing."""

    type: str


def plain(value: Any) -> Any:
    """Return a value in JSON types: tuples as lists, and keys as JSON writes them."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else json.dumps(key, default=repr): plain(item)
            for key, item in value.items()
        }
    return value


def shown(value: Any) -> str:
    """Return the beginning of a value as text for a message."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # too deep, too long
        text = type(value).__name__
    return repr(text[:MAX_SHOWN])[1:-1] + ("..." if len(text) > MAX_SHOWN else "")
