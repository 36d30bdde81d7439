"""`screen`: sample a few rollouts of each visit, and go on with the prompts that pass.

SPEED-RL (arXiv 2506.09016; rule from the authors' code) samples 4 rollouts, and 20 more in the same
group if they are mixed. Pilot-Commit (arXiv 2605.26606) samples 32, and 96 more if the pass rate is
within 0.125 to 0.75. Here `pilots` is the plan's group size, and a group passes if it is mixed and
its mean is within `low` to `high`. A merged group is selected by its first rollouts, so its mean is
nearer to one half than the pass rate: at a pass rate of 0.125, 24 rollouts have the mean 0.154. Use
with `select: mixed`, which drops the groups that did not pass; their rollouts are charged. Not
done: both papers' pilots of the next step in the same engine call, their buffers of prompts that
passed, and Pilot-Commit's removal of solved prompts."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import at_least, settings, share
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.methods.control import plan as follow
from tasks.train.methods.control.pilots import extension
from tasks.train.slots import SoFar


@settings
class Settings:
    more: int = 20  # further rollouts of a prompt that passes
    low: float = 0.0  # smallest mean of the pilots
    high: float = 1.0  # largest mean of the pilots

    def __post_init__(self) -> None:
        at_least(1, train__control__more=self.more)
        share(train__control__low=self.low, train__control__high=self.high)
        at_least(self.low, train__control__high=self.high)


@dataclass
class State:
    """The next visit; the numbers of groups screened and passed so far."""

    position: int = 0
    screened: int = 0
    passed: int = 0


class Method(follow.Method):
    asks_again = True

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan, self.state = settings, plan, State()

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the plan's next visits, then more rollouts of the groups that pass."""
        if so_far.rollouts is None:
            return super().next(so_far, rng)
        if so_far.num_requests > 1:
            return None
        size_Q, correct_Q = so_far.rollouts.graded_Q()
        mean_Q = correct_Q / np.maximum(size_Q, 1)
        passed_Q = (correct_Q > 0) & (correct_Q < size_Q)
        passed_Q &= (mean_Q >= self.settings.low) & (mean_Q <= self.settings.high)
        self.state.screened += len(passed_Q)
        self.state.passed += int(passed_Q.sum())
        return extension(self, so_far.rollouts, self.settings.more * passed_Q)

    def describe(self) -> dict[str, float]:
        """Return the share of groups that passed so far."""
        return {"passed_rate": self.state.passed / max(self.state.screened, 1)}
