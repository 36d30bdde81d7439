"""What the controls share that take the plan for a pool of prompts and a budget of rollouts, and
choose from it by what they predict."""

from dataclasses import dataclass

import numpy as np

from tasks.train.plan import Plan
from tasks.train.rollouts import GroupRequest, Ints
from tasks.train.slots import SoFar


@dataclass(frozen=True)
class PromptPool:
    """The prompts of a plan by row, each with the size of its first group; the rollouts of all
    visits are the budget."""

    plan: Plan
    prompt_rows: Ints
    group_sizes: Ints
    budget: int

    @classmethod
    def of(cls, plan: Plan) -> "PromptPool":
        rows, first = np.unique(plan.prompt_rows_V, return_index=True)
        return cls(plan, rows, plan.group_sizes_V[first], plan.num_rollouts())

    def room(self, so_far: SoFar, spent: int) -> int:
        """How much the step may take, in the batch's unit; 0 where the budget is spent."""
        return so_far.room(self.plan.batch) if spent < self.budget else 0

    def take(self, order: Ints, room: int) -> Ints:
        """The first places of `order` whose groups fit `room`, at least one."""
        return order[: self.plan.fit(self.group_sizes[order], room)]

    def request(self, places: Ints, spent: int) -> GroupRequest:
        """A group for each of `places`, the last ones cut to the budget."""
        sizes = self.group_sizes[places]
        left = np.clip(self.budget - spent - (np.cumsum(sizes) - sizes), 0, sizes)
        places, sizes = places[left > 0], left[left > 0]
        return GroupRequest(self.prompt_rows[places], sizes, 0, 0)
