"""Shared code of the controls that first sample a few rollouts of each of the plan's visits, the
pilots, and then share the rest of the step's rollouts among the same groups by their outcomes.

A merged group's size depends on its outcomes, so its mean is a biased estimate of the pass rate."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tasks.common.params import ParamsError
from tasks.train.data.columns import Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import plan as follow
from tasks.train.slots import SoFar


@dataclass
class State:
    """The next visit; the rollouts of the step that are still to be shared; all rollouts so far,
    and those of pilots."""

    position: int = 0
    rest: int = 0
    rollouts: int = 0
    pilots: int = 0


class PilotControl(follow.Method):
    """A control that shares the rest of a step's rollouts in `rounds`; `settings` has the numbers
    `pilots` and `largest`, the size of the largest group."""

    asks_again = True
    rounds = 1

    def __init__(self, settings: Any, plan: Plan) -> None:
        self.settings, self.plan, self.state = settings, plan, State()
        if plan.group_sizes_V.max() <= settings.pilots:
            raise ParamsError(
                f"the plan's groups have at most {plan.group_sizes_V.max()} rollouts, and "
                f"train.control.pilots is {settings.pilots}: nothing is left to share. Lower it, "
                "or raise the group size of allocate"
            )

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the pilots of the plan's next visits, then more rollouts of their groups."""
        state = self.state
        if so_far.rollouts is not None:
            left = self.rounds + 1 - so_far.num_requests
            return self.more(so_far.rollouts, left) if left > 0 and state.rest else None
        request = super().next(so_far, rng)
        if request is None:
            return None
        counts = np.minimum(request.counts, self.settings.pilots)
        state.rest = int((request.counts - counts).sum())
        state.pilots += int(counts.sum())
        state.rollouts += int(counts.sum())
        return replace(request, counts=counts)

    def more(self, rollouts: Rollouts, left: int) -> GroupRequest | None:
        """Return a request for the part of this round, of `left` rounds."""
        size_Q, correct_Q = rollouts.graded_Q()
        room = -(-self.state.rest // left)
        gain = self.gains(correct_Q, size_Q)
        more_Q = shared(room, rollouts.sizes_Q(), self.settings.largest, gain)
        self.state.rest -= room
        self.state.rollouts += int(more_Q.sum())
        return extension(self, rollouts, more_Q)

    def gains(self, correct_Q: Ints, size_Q: Ints) -> Callable[[int, int], float]:
        """Return the gain of a rollout of group q after m more ones, as a function of (q, m); it
        does not rise with m. `size_Q` are the groups' graded rollouts."""
        raise NotImplementedError

    def describe(self) -> dict[str, float]:
        """Return the share of rollouts that are pilots."""
        return {"pilot_rate": self.state.pilots / max(self.state.rollouts, 1)}


def extension(method: follow.Method, rollouts: Rollouts, more_Q: Ints) -> GroupRequest | None:
    """Return a request for `more_Q` rollouts of each of the step's groups; None for none."""
    groups, last = np.flatnonzero(more_Q), method.state.position - 1
    if not len(groups):
        return None
    place = int(method.plan.passes_V[last]), int(method.plan.phases_V[last])
    return GroupRequest(rollouts.prompt_rows_Q[groups], more_Q[groups], *place, groups)


def shared(room: int, sizes_Q: Ints, largest: int, gain: Callable[[int, int], float]) -> Ints:
    """Return how many of `room` rollouts each group gets: each goes to the group where its `gain`
    is largest, the smallest of equal ones, unless the group has `largest`. Optimal if no gain rises
    with the number of rollouts."""
    more_Q, sizes = np.zeros(len(sizes_Q), dtype=np.int64), sizes_Q.tolist()
    heap = [(-gain(q, 0), size, q) for q, size in enumerate(sizes) if size < largest]
    heapq.heapify(heap)
    for _ in range(room):
        if not heap:
            break
        _, size, q = heapq.heappop(heap)
        more_Q[q] += 1
        if size + 1 < largest:
            heapq.heappush(heap, (-gain(q, int(more_Q[q])), size + 1, q))
    return more_Q
