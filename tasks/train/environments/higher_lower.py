"""`higher_lower`: the gold answer is a number. The environment replies that the policy's number is
too small or too large, until it is right.

Numbers are read and compared as in the verifier `numeric`; in a list only the last one counts. A
turn without a number, or with x / 0, gets `no_number`. The wording of the replies is a setting.
"""

from dataclasses import dataclass

from tasks.grading.answers import numbers
from tasks.grading.verifiers import numeric
from tasks.train.environments import environment


@dataclass(frozen=True)
class Settings:
    higher: str
    lower: str
    no_number: str


class Episode(environment.Episode):
    def __init__(self, settings: Settings, answer: str) -> None:
        self.settings = settings
        gold = numeric.number_in_gold(answer)
        self.gold = gold and gold[0]

    def reply(self, turn: str) -> str | None:
        """Return a reply; None if the number is right, or the gold answer contains no number."""
        found = numeric.find_number(turn)
        if self.gold is None:
            return None
        given = found and numbers.value_of(found)
        if given is None or given[0] != given[0]:  # NaN: x / 0
            return self.settings.no_number
        if numbers.same(self.gold, given):
            return None
        is_less = numbers.exactly(given[0]) < numbers.exactly(self.gold[0])
        return self.settings.higher if is_less else self.settings.lower


class Environment(environment.Environment):
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, prompt: str, answer: str) -> Episode:
        return Episode(self.settings, answer)
