"""`plan`: visit the plan in its order. A step takes as many visits as fit its batch and never straddles two phases."""

from collections.abc import Sequence

import numpy as np

from tasks.train.batch import Ints, Request, Rollouts, State
from tasks.train.settings import BatchSettings


def start(plan: dict[str, Ints], batch: BatchSettings) -> State:
    """The state: the plan's columns, the position in it, and the batch (`size`, counted in rollouts or prompts)."""
    return {
        **plan,
        "position": np.array(0),
        "size": np.array(batch.size),
        "counts_rollouts": np.array(batch.unit == "rollouts"),
    }


def next(state: State, so_far: Sequence[Rollouts]) -> Request | None:
    """The next step's visits, all at once; None when they were drawn, or when the plan is at its end."""
    first = int(state["position"])
    if so_far or first == len(state["phase"]):
        return None
    last = first + num_visits(state, first)
    state["position"] = np.array(last)
    return Request(
        np.asarray(state["prompt_row"][first:last], dtype=np.int64),
        np.asarray(state["group_size"][first:last], dtype=np.int64),
        int(state["pass"][first]),
        int(state["phase"][first]),
    )


def num_visits(state: State, first: int) -> int:
    """How many visits from `first` on fit the batch, of one phase, one at least."""
    phase = np.asarray(state["phase"][first:])
    same = int(np.argmax(phase != phase[0])) if (phase != phase[0]).any() else len(phase)
    sizes = np.asarray(state["group_size"][first : first + same], dtype=np.int64)
    cost = np.cumsum(sizes if state["counts_rollouts"] else np.ones_like(sizes))
    return max(int(np.searchsorted(cost, int(state["size"]), side="right")), 1)


def observe(state: State, rollouts: Rollouts) -> None:
    """A plan does not react."""


def progress(state: State) -> float:
    """The share of the plan's rollouts that was asked for."""
    sizes = np.asarray(state["group_size"], dtype=np.float64)
    return float(sizes[: int(state["position"])].sum() / sizes.sum())
