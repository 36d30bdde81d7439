"""`dapo`: DAPO's dynamic sampling (arXiv 2503.14476), bounded: sample more prompts while too few
groups are mixed.

Use with `select: {method: mixed}`. The refills come from the plan, so a run ends with the plan and
costs the same, whatever the share of groups with equal rewards; it has fewer steps, each with a
full batch. Every sampled rollout is charged as generated. A step is refilled at most `max_refills`
times, so that a batch that never fills cannot loop forever. Left out: cutting a batch that is
larger than requested.
"""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.groups import mixed_groups
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import plan as follow
from tasks.train.slots import SoFar


@settings
class Settings:
    max_refills: int = 3  # maximum number of further requests per step

    def __post_init__(self) -> None:
        at_least(0, train__control__max_refills=self.max_refills)


@dataclass
class State:
    """The next visit; refills and steps so far, and steps unfilled after `max_refills`."""

    position: int = 0
    refills: int = 0
    unfilled_steps: int = 0
    steps: int = 0


class Method(follow.Method):
    asks_again = True

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan, self.state = settings, plan, State()

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return first a batch, then further visits of the phase while mixed groups are missing."""
        plan, last = self.plan, self.state.position - 1
        first = plan.start(last + 1, so_far.done)
        if first is None:
            return None
        if so_far.rollouts is None:
            return self.take(follow.next_visits(plan, first, so_far))
        room = min(plan.batch.size - so_far.replayed, so_far.room(plan.batch))
        missing = room - mixed_size(plan, so_far.rollouts)
        if missing <= 0 or plan.phases_V[first] != plan.phases_V[last]:
            return None
        if so_far.num_requests > self.settings.max_refills:
            self.state.unfilled_steps += 1
            return None
        self.state.refills += 1
        visits = plan.window(first, missing)
        return self.take(visits[: plan.num_visits(plan.group_sizes_V[visits], missing)])

    def observe(self, rollouts: Rollouts) -> None:
        self.state.steps += 1

    def describe(self) -> dict[str, float]:
        """Return the refills per step, and the share of steps without a full batch."""
        steps = max(self.state.steps, 1)
        return {
            "refills_mean": self.state.refills / steps,
            "unfilled_rate": self.state.unfilled_steps / steps,
        }


def mixed_size(plan: Plan, rollouts: Rollouts) -> int:
    """Return the size of the mixed groups, graded rollouts only, in the batch's unit."""
    graded = rollouts.where(~rollouts.is_error_B())
    mixed_Q = mixed_groups(graded.rewards_B, graded.group_B, len(rollouts.prompt_rows_Q))
    return int(plan.cost(graded.sizes_Q()[mixed_Q]).sum())
