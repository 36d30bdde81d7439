"""`dapo`: DAPO's dynamic sampling (arXiv 2503.14476), bounded: while too few groups are mixed, draw
more prompts.

Use with `select: {method: mixed}`. The refills come from the plan, so a run ends when the plan does
and costs what the plan says, whatever the share of dead groups: fewer steps, each of them full.
Every rollout drawn is charged as generated. At most `max_refills` further draws are made in a step,
so that a batch that never fills cannot spin. Left out: cutting a batch that came out larger than
asked for."""

from collections.abc import Sequence

import numpy as np

from tasks.common.params import at_least
from tasks.train.methods.control import plan
from tasks.train.methods.control.plan import progress
from tasks.train.rollouts import Ints, Request, Rollouts, State, mixed_groups
from tasks.train.settings import BatchSettings

__all__ = ["describe", "next", "observe", "progress", "start"]


def start(columns: dict[str, Ints], batch: BatchSettings, *, max_refills: int) -> State:
    """The plan's state, the limit, and how often it was reached."""
    at_least(0, train__control__max_refills=max_refills)
    counters = {"refills": np.array(0), "unfilled_steps": np.array(0), "steps": np.array(0)}
    return {**plan.start(columns, batch), "max_refills": np.array(max_refills), **counters}


def next(state: State, so_far: Sequence[Rollouts], rng: np.random.Generator) -> Request | None:
    """First a batch, then as many visits as are missing to a batch of mixed groups, of the same
    phase."""
    if not so_far:
        return plan.next(state, so_far, rng)
    missing = int(state["size"]) - sum(mixed_size(state, rollouts) for rollouts in so_far)
    first = int(state["position"])
    if missing <= 0 or plan.at_end(state) or state["phase"][first] != state["phase"][first - 1]:
        return None
    if len(so_far) > int(state["max_refills"]):
        state["unfilled_steps"] = np.array(state["unfilled_steps"] + 1)
        return None
    state["refills"] = np.array(state["refills"] + 1)
    sizes = plan.visits_of_phase(state, first)
    num = plan.num_visits(state, sizes, missing)
    return plan.take(state, first + np.arange(num), sizes[:num], first + num)


def mixed_size(state: State, rollouts: Rollouts) -> int:
    """Rollouts of mixed groups, or their prompts, in the batch's unit. What could not be graded
    does not count."""
    graded = ~rollouts.is_error_B()
    num_groups = len(rollouts.prompt_rows_Q)
    mixed_Q = mixed_groups(rollouts.rewards_B[graded], rollouts.group_B[graded], num_groups)
    return int(
        mixed_Q[rollouts.group_B[graded]].sum() if state["counts_rollouts"] else mixed_Q.sum()
    )


def observe(state: State, rollouts: Rollouts) -> None:
    """Count the step."""
    state["steps"] = np.array(state["steps"] + 1)


def describe(state: State) -> dict[str, float]:
    """Draws a step beyond the first, and the share of steps that stayed short of a batch at the
    limit."""
    steps = max(int(state["steps"]), 1)
    return {
        "refills_mean": float(state["refills"]) / steps,
        "unfilled_rate": float(state["unfilled_steps"]) / steps,
    }
