"""A number that is not known yet: at least, expected, at most."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """`low`, `middle` and `high` of a number that is not negative."""

    low: float
    middle: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, other: "Range | float") -> "Range":
        factor = other if isinstance(other, Range) else exactly(other)
        return Range(self.low * factor.low, self.middle * factor.middle, self.high * factor.high)

    def at(self, rate: "Range") -> "Range":
        """So much work at a rate: the least work at the highest rate, and so on."""
        return Range(self.low / rate.high, self.middle / rate.middle, self.high / rate.low)

    def at_most(self, limit: float) -> "Range":
        return Range(min(self.low, limit), min(self.middle, limit), min(self.high, limit))


def exactly(number: float) -> Range:
    return Range(number, number, number)


def around(number: float, factor: float) -> Range:
    """From `number / factor` to `number * factor`."""
    return Range(number / factor, number, number * factor)


NOTHING = exactly(0.0)
