"""`xrpo`: share a step's rollouts by how much they narrow the estimates of the groups' rewards
(XRPO, arXiv 2510.06672, section on hierarchical rollout planning).

Each visit of the plan gets `pilots` rollouts. The rest of the step's rollouts is shared in
`phases` minus one rounds, each rollout to the group with the largest h(n) - h(n + 1) + bonus
sqrt(ln(1 + T) / n). Here n is the group's number of rollouts, T the step's before the round, and
h(n) the half width t s / sqrt(n) of the confidence interval of the mean reward, with the deviation
s (n - 1 in its divisor) of the rollouts so far and Student's t with n - 1 degrees of freedom. A
group of equal rewards gets rollouts by the bonus alone. With a bonus of 1 it would outweigh all
gains. The paper's sharper advantages for novel answers are a shape of their own. Use with `select:
mixed`."""

from collections.abc import Callable
from math import log1p, sqrt

import scipy

from tasks.common.params import ParamsError, at_least, settings
from tasks.train.data.columns import Ints
from tasks.train.data.plan import Plan
from tasks.train.methods.control.pilots import PilotControl


@settings
class Settings:
    pilots: int = 4  # rollouts of each visit before the others are shared
    phases: int = 3  # requests of a step, the pilots included
    confidence: float = 0.95  # of the interval of the mean reward
    bonus: float = 0.1  # weight of the exploration of small groups
    largest: int = 32  # maximum group size, pilots included

    def __post_init__(self) -> None:
        at_least(2, train__control__pilots=self.pilots, train__control__phases=self.phases)
        at_least(self.pilots + 1, train__control__largest=self.largest)
        at_least(0, train__control__bonus=self.bonus)
        if not 0 < self.confidence < 1:
            raise ParamsError(
                f"train.control.confidence is {self.confidence}; it is a probability between 0 "
                "and 1"
            )


EXAMPLE = Settings(pilots=2)


class Method(PilotControl):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        super().__init__(settings, plan)
        self.rounds = settings.phases - 1

    def gains(self, correct_Q: Ints, size_Q: Ints) -> Callable[[int, int], float]:
        """Return the gains. A group with fewer than two graded rollouts has the bonus alone."""
        settings, total = self.settings, int(size_Q.sum())

        def gain(q: int, m: int) -> float:
            size, n = int(size_Q[q]), int(size_Q[q]) + m
            bonus: float = settings.bonus * sqrt(log1p(total) / max(n, 1))
            if size < 2:
                return bonus
            share = int(correct_Q[q]) / size
            deviation = sqrt(share * (1 - share) * size / (size - 1))
            return narrowing(n, deviation, settings.confidence) + bonus

        return gain


def half_width(size: int, deviation: float, confidence: float) -> float:
    """Return the half width of the interval of a mean of `size` rewards with this deviation."""
    quantile = scipy.special.stdtrit(size - 1, 0.5 + confidence / 2)
    return float(quantile) * deviation / sqrt(size)


def narrowing(size: int, deviation: float, confidence: float) -> float:
    """Return by how much one more rollout narrows the interval."""
    wide, narrow = (half_width(n, deviation, confidence) for n in (size, size + 1))
    return wide - narrow
