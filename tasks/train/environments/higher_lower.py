"""`higher_lower`: the gold answer is a number, and the policy is told whether its own is too small
or too large, until it is right.

The number of a turn is its last one, as the verifier `numeric` reads it. A turn without a number
gets the third reply. The replies are settings, as a policy must be able to read them.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from tasks.train.environments import environment

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Settings:
    higher: str
    lower: str
    no_number: str


class Episode(environment.Episode):
    def __init__(self, settings: Settings, gold: Fraction | None) -> None:
        self.settings, self.gold = settings, gold

    def reply(self, turn: str) -> str | None:
        """None where the number is right, and where the gold answer is none."""
        found = last_number(turn)
        if self.gold is None or found == self.gold:
            return None
        if found is None:
            return self.settings.no_number
        return self.settings.higher if found < self.gold else self.settings.lower


class Environment(environment.Environment):
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, prompt: str, answer: str) -> Episode:
        return Episode(self.settings, last_number(answer))


def last_number(text: str) -> Fraction | None:
    """The last decimal number of a text; a comma between thousands is left out."""
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
    return Fraction(found[-1]) if found else None
