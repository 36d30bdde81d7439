"""A number that is not yet known: its lower bound, expected value and upper bound."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A lower bound, an expected value and an upper bound of a non-negative number."""

    low: float
    middle: float
    high: float

    def __iter__(self) -> Iterator[float]:
        return iter((self.low, self.middle, self.high))

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, other: "Range | float") -> "Range":
        factor = other if isinstance(other, Range) else exactly(other)
        return Range(self.low * factor.low, self.middle * factor.middle, self.high * factor.high)

    def at(self, rate: "Range") -> "Range":
        """Return this amount divided by a rate: `low` is the lowest amount at the highest rate."""
        return Range(self.low / rate.high, self.middle / rate.middle, self.high / rate.low)

    def jointly(self, number: int) -> "Range":
        """Return bounds for a product of `number` independent factors, from the product of their
        bounds. Extremes of all at once are unlikely, so the distances are divided by a root."""
        middle, share = max(self.middle, 1e-300), 1.0 / math.sqrt(number)
        low, high = (middle * (end / middle) ** share for end in (self.low, self.high))
        return Range(low, self.middle, high)

    def at_most(self, limit: float) -> "Range":
        return Range(min(self.low, limit), min(self.middle, limit), min(self.high, limit))


def exactly(number: float) -> Range:
    return Range(number, number, number)


def around(number: float, factor: float) -> Range:
    """Return the range from `number / factor` to `number * factor`."""
    return Range(number / factor, number, number * factor)


def spanning(numbers: Range) -> Range:
    """Return `numbers` with their minimum as `low` and maximum as `high`, because with a fixed
    budget the shortest rollouts need not use the fewest tokens."""
    return Range(min(numbers), numbers.middle, max(numbers))


NOTHING = exactly(0.0)
