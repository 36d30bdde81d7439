"""Shared code of the controls that use the plan as a pool of prompts and a budget of rollouts, and
choose from it by prediction."""

from dataclasses import dataclass

import numpy as np

from tasks.train.data.columns import Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.slots import Control, SoFar


@dataclass(frozen=True)
class PromptPool:
    """The prompts of a plan by row, each with the size of its first group. The rollouts of all
    visits are the limit, unless the run has a separate budget."""

    plan: Plan
    prompt_rows: Ints
    group_sizes: Ints
    num_rollouts: int

    @classmethod
    def of(cls, plan: Plan) -> "PromptPool":
        rows, first = np.unique(plan.prompt_rows_V, return_index=True)
        return cls(plan, rows, plan.group_sizes_V[first], plan.num_rollouts())

    def room(self, so_far: SoFar, spent: int) -> int:
        """Return the amount that the step may sample, in the batch's unit; 0 at the run's end."""
        is_over = so_far.done is None and spent >= self.num_rollouts
        return 0 if is_over else so_far.room(self.plan.batch)

    def take(self, order: Ints, room: int) -> Ints:
        """Return the first entries of `order` whose groups fit in `room`, at least one."""
        return order[: self.plan.fit(self.group_sizes[order], room)]

    def request(self, places: Ints, so_far: SoFar, spent: int) -> GroupRequest:
        """Return a request for the prompts at `places` in the pool, with sizes as in `cut`."""
        sizes = self.cut(self.group_sizes[places], so_far, spent)
        return GroupRequest(self.prompt_rows[places[sizes > 0]], sizes[sizes > 0], 0, 0)

    def cut(self, sizes: Ints, so_far: SoFar, spent: int) -> Ints:
        """Return `sizes` cut to the rollouts left in the plan's total, 0 for groups beyond it. If
        the run has a budget, return them unchanged."""
        if so_far.done is not None:
            return sizes
        return np.clip(self.num_rollouts - spent - (np.cumsum(sizes) - sizes), 0, sizes)


class PoolControl(Control):
    """A control that samples from a pool. `state.spent` is the number of rollouts spent."""

    pool: PromptPool

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return groups of the chosen prompts; None once the step has them, or at the run's end."""
        pool, state = self.pool, self.state
        room = pool.room(so_far, state.spent)
        if so_far.num_requests or not room:
            return None
        request = pool.request(self.choose(room, rng), so_far, state.spent)
        state.spent += int(request.counts.sum())
        return request

    def choose(self, room: int, rng: np.random.Generator) -> Ints:
        """Return the pool indices of the chosen prompts, whose groups fill `room`."""
        raise NotImplementedError

    def progress(self) -> float:
        return float(min(self.state.spent / self.pool.num_rollouts, 1.0))
