"""`dars`: a second stage of rollouts for prompts that are hard in the first (DARS, arXiv 2508.13755
v5; rule from the authors' code).

The first stage samples the plan's group of N. A prompt solved with accuracy a below 1/2 then gets
more rollouts in the same group, which raise its summed |advantage| to that of a group with accuracy
1/2 (`equal`: about N / (4a(1-a)) in total) or to 2(1-a) times that sum (`hard`: about N / (2a),
sGPO's law), at most `largest` in total. Zero successes count as half a success. `standardised`:
whether the advantage is divided by the standard deviation; the authors' is not (`advantage:
dr_grpo`). Use with `select: mixed`. The extra draws depend on the outcome of the first, so the
merged group's mean is a biased estimate of the pass rate. A batch's size counts only first stages.
Left out: the full-batch update of DARS-B, which `train.batch` and `train.updates` can configure."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isqrt, sqrt
from typing import Literal

import numpy as np

from tasks.common.params import ParamsError, at_least, settings
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import plan as follow
from tasks.train.methods.control.pilots import extension
from tasks.train.slots import SoFar

Schedule = Literal["equal", "hard"]


@settings
class Settings:
    schedule: Schedule = "hard"  # number of rollouts in the second stage
    standardised: bool = False  # whether advantages are divided by the deviation
    largest: int = 64  # maximum group size, both stages together

    def __post_init__(self) -> None:
        at_least(2, train__control__largest=self.largest)


@dataclass
class State:
    """The next visit; the numbers of rollouts in the first and the second stage so far."""

    position: int = 0
    first_stage: int = 0
    second_stage: int = 0


class Method(follow.Method):
    asks_again = True

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan, self.state = settings, plan, State()
        if plan.group_sizes_V.min() >= settings.largest:
            raise ParamsError(
                f"train.control.largest is {settings.largest}, and the plan's groups are no "
                "smaller, so dars could add no rollout: raise it, or lower the size of groups"
            )

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the plan's next visits, then more rollouts of their hard groups."""
        if so_far.rollouts is not None:
            return self.second_stage(so_far.rollouts) if so_far.num_requests == 1 else None
        request = super().next(so_far, rng)
        if request is not None:
            self.state.first_stage += int(request.counts.sum())
        return request

    def second_stage(self, rollouts: Rollouts) -> GroupRequest | None:
        """Return a request for more rollouts of hard groups; None if there are none."""
        size_Q, correct_Q = rollouts.graded_Q()
        pairs = zip(correct_Q, size_Q, strict=True)
        more_Q = np.array([self.extra(*pair) for pair in pairs])  # nosec B610  # no Django
        self.state.second_stage += int(more_Q.sum())
        return extension(self, rollouts, more_Q)

    def extra(self, correct: int, size: int) -> int:
        """Return the number of second-stage rollouts for a group with `correct` successes."""
        settings = self.settings
        if size == 0:
            return 0
        more = extra_rollouts(correct, size, settings.schedule, settings.standardised)
        return min(more, max(settings.largest - size, 0))

    def describe(self) -> dict[str, float]:
        """Return the ratio of second-stage rollouts to first-stage rollouts."""
        return {"second_stage_rate": self.state.second_stage / max(self.state.first_stage, 1)}


def extra_rollouts(correct: int, size: int, schedule: Schedule, standardised: bool) -> int:
    """Return the number of rollouts to add to a group of `size` with `correct` successes, before
    the limit. Fractions are exact: a float's tiny error, rounded up, could add a rollout."""
    accuracy = Fraction(2 * correct or 1, 2 * size)
    if accuracy >= Fraction(1, 2):
        return 0
    weight = 1 if schedule == "equal" else 2 * (1 - accuracy)
    even = 4 * accuracy * (1 - accuracy)  # the summed advantage relative to accuracy 1/2
    if standardised:
        # the factor is the root of a ratio; if the root is rational, keep it exact
        n, d = even.numerator, even.denominator
        is_square = isqrt(n) ** 2 == n and isqrt(d) ** 2 == d
        even = Fraction(isqrt(n), isqrt(d)) if is_square else Fraction(sqrt(n / d))
    return max(ceil(size * (weight / even - 1)), 0)
