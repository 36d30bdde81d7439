"""`greso`: skip prompts whose last groups had no gradient, before they are sampled (GRESO, arXiv
2506.02177).

A prompt that was sampled before is skipped with probability 1 - max(p_easy^z, floor) if its last z
groups were all correct, and with 1 - max(p_hard^z, floor) if its last z were all wrong. A mixed
group resets z; a group without graded rollouts does not change it. Both p move by `step` per
training step within [p_min, p_max]: down if the share of all-correct (all-wrong) groups among the
sampled ones is at or above its target, otherwise up. The targets are a third of `dead_rate` for
all-correct, two thirds for all-wrong groups. Left out: the paper's growing batches.
"""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import plan as follow
from tasks.train.slots import SoFar

EASY_SHARE = 1 / 3  # share of all-correct groups in the target rate of dead groups


@settings
class Settings:
    dead_rate: float = 0.25  # target share of all-correct and all-wrong groups
    step: float = 0.01  # change of a probability per step
    floor: float = 0.01  # minimum probability of a visit
    p_start: float = 0.5  # both probabilities before the first step
    p_min: float = 0.05  # minimum of both probabilities
    p_max: float = 0.95  # maximum of both probabilities

    def __post_init__(self) -> None:
        share(train__control__dead_rate=self.dead_rate, train__control__floor=self.floor)
        above_zero(train__control__floor=self.floor)  # or all prompts may be skipped forever
        share(train__control__p_start=self.p_start)
        share(train__control__p_min=self.p_min, train__control__p_max=self.p_max)
        at_least(self.p_min, train__control__p_max=self.p_max)
        at_least(0, train__control__step=self.step)


@dataclass
class State:
    """The next visit; each prompt's streak (positive: all correct, negative: all wrong); `p_easy`
    and `p_hard`; the numbers of visits taken and skipped."""

    streaks: Ints
    p_easy: float
    p_hard: float
    position: int = 0
    taken: int = 0
    skipped: int = 0


class Method(follow.Method):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan = settings, plan
        streaks = np.zeros(plan.num_prompts, dtype=np.int64)
        self.state = State(streaks, settings.p_start, settings.p_start)

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the next unskipped visits of one phase, up to a full batch; None once they are
        sampled, or at the plan's end."""
        plan, state = self.plan, self.state
        room = so_far.room(plan.batch)
        while not so_far.num_requests:
            first = plan.start(state.position, so_far.done)
            if first is None:
                return None
            taken, end = self.draw(first, room, rng)
            state.taken += len(taken)
            state.skipped += end - first - len(taken)
            state.position = end
            if len(taken):
                return plan.request(taken, plan.group_sizes_V[taken])
        return None

    def draw(self, first: int, room: int, rng: np.random.Generator) -> tuple[Ints, int]:
        """Return the next unskipped visits of one phase from `first` on, as many as fit in `room`,
        and the visit from which to continue.

        A phase may have ten million visits, so decide only for a window of them, and double it
        until it contains a batch and one more visit, or the whole phase."""
        plan = self.plan
        width, kept_V = room, np.zeros(0, dtype=np.bool_)
        while True:
            visits = plan.rest_of_phase(first, width)
            new = visits[len(kept_V) :]
            kept = rng.random(len(new)) >= self.skip_probability(new)
            kept_V = np.concatenate([kept_V, kept])
            taken = visits[kept_V]
            num = plan.num_visits(plan.group_sizes_V[taken], room)
            if num < len(taken):
                return taken[:num], int(taken[num - 1]) + 1
            if len(visits) < width:
                return taken, int(visits[-1]) + 1
            width *= 2

    def skip_probability(self, visits: Ints) -> Floats:
        """Return the probability of skipping each visit; 0 for a prompt without a streak."""
        streak = self.state.streaks[self.plan.prompt_rows_V[visits]]
        p = np.where(streak > 0, self.state.p_easy, self.state.p_hard)
        kept = np.maximum(p ** np.abs(streak), self.settings.floor)
        return np.where(streak != 0, 1.0 - kept, 0.0)

    def observe(self, rollouts: Rollouts) -> None:
        """Lengthen or reset the streaks of the step's prompts, and adapt the two probabilities."""
        size_Q, correct_Q = rollouts.graded_Q()
        easy_Q = (correct_Q == size_Q) & (size_Q > 0)
        dead_Q = easy_Q | ((correct_Q == 0) & (size_Q > 0))
        streaks = self.state.streaks
        for group in np.flatnonzero(size_Q):  # those with graded rollouts
            row, sign = rollouts.prompt_rows_Q[group], 1 if easy_Q[group] else -1
            streaks[row] = sign * (max(sign * streaks[row], 0) + 1) if dead_Q[group] else 0
        num_graded = int((size_Q > 0).sum())
        if num_graded:
            self.move(int(easy_Q.sum()) / num_graded, int((dead_Q & ~easy_Q).sum()) / num_graded)

    def move(self, easy_rate: float, hard_rate: float) -> None:
        """Lower `p_easy` if `easy_rate` reaches its target, else raise it; likewise `p_hard`."""
        settings, state = self.settings, self.state
        easy_target = EASY_SHARE * settings.dead_rate
        hard_target = (1 - EASY_SHARE) * settings.dead_rate
        state.p_easy = self.moved(state.p_easy, easy_rate >= easy_target)
        state.p_hard = self.moved(state.p_hard, hard_rate >= hard_target)

    def moved(self, p: float, is_high: bool) -> float:
        """Return the probability `p` moved one step down or up, within its limits."""
        step = -self.settings.step if is_high else self.settings.step
        return float(np.clip(p + step, self.settings.p_min, self.settings.p_max))

    def describe(self) -> dict[str, float]:
        """Return the share of visits skipped so far, and the two probabilities."""
        state = self.state
        skipped = state.skipped / max(state.taken + state.skipped, 1)
        return {"skipped_rate": skipped, "p_easy": state.p_easy, "p_hard": state.p_hard}
