"""`hora`: share a step's rollouts so that as many groups as possible get a success (HORA, arXiv
2605.07114; rule from the abstract, formula ours).

Each visit of the plan gets `pilots` rollouts. The rest of the step's rollouts is shared to maximise
the summed probability of at least one success among a group's extra rollouts. After s successes of
n, with a uniform prior, it is h(m) = 1 - prod_{j<m} (n - s + 1 + j) / (n + 2 + j) for m extra ones.
h is concave, so the greedy choice is optimal. `utility: mixed` maximises the probability of a mixed
group instead, pilots included: a solved prompt, which takes the first rollouts with `hit`, gets
some only for a failure, and a mixed group only if no other group gains. The authors' number of
pilots is not known. Use with `select: mixed`."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Ints
from tasks.train.methods.control.pilots import PilotControl


@settings
class Settings:
    pilots: int = 4  # rollouts of each visit before the others are shared
    largest: int = 32  # maximum group size, pilots included
    utility: Literal["hit", "mixed"] = "hit"  # an extra success, or a mixed group

    def __post_init__(self) -> None:
        at_least(1, train__control__pilots=self.pilots)
        at_least(self.pilots + 1, train__control__largest=self.largest)


EXAMPLE = Settings(pilots=1)


class Method(PilotControl):
    def gains(self, correct_Q: Ints, size_Q: Ints) -> Callable[[int, int], float]:
        """Return the gains. A group without graded rollouts has those of an unknown prompt."""
        mixed = self.settings.utility == "mixed"

        def gain(q: int, m: int) -> float:
            correct, size = int(correct_Q[q]), int(size_Q[q])
            if mixed and 0 < correct < size:
                return 0.0
            seen = 0 if mixed else correct  # of the outcome that a group of equal ones lacks
            return hit(m + 1, seen, size) - hit(m, seen, size)

        return gain


def hit(more: int, correct: int, size: int) -> float:
    """Return the probability of a success in `more` rollouts, after `correct` of `size`."""
    j = np.arange(more)
    return float(1.0 - np.prod((size - correct + 1 + j) / (size + 2 + j)))
