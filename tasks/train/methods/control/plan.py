"""`plan`: visit the plan in its order. A step takes as many visits as fit its batch and never
straddles two phases."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.train.data.columns import Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.slots import Control, SoFar


@dataclass
class State:
    """The index of the next visit."""

    position: int = 0


class Method(Control):
    """The control `plan`, and the base of others that follow the plan by their `state.position`."""

    state: Any

    def __init__(self, plan: Plan) -> None:
        self.plan, self.state = plan, State()

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return a request for all visits of the step; None once it is made, or after the plan."""
        first = self.plan.start(self.state.position, so_far.done)
        if so_far.num_requests or first is None:
            return None
        return self.take(next_visits(self.plan, first, so_far))

    def take(self, visits: Ints) -> GroupRequest:
        """Return the request for `visits`, and continue after them next time."""
        self.state.position = int(visits[-1]) + 1
        return self.plan.request(visits, self.plan.group_sizes_V[visits])

    def progress(self) -> float:
        return self.plan.share_before(self.state.position)


def next_visits(plan: Plan, first: int, so_far: SoFar) -> Ints:
    """Return the visits, starting at `first`, that fill a batch along with the replayed groups."""
    room = so_far.room(plan.batch)
    visits = plan.window(first, room)
    return visits[: plan.num_visits(plan.group_sizes_V[visits], room)]
