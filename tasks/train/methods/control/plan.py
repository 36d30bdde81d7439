"""`plan`: visit the plan in its order. A step takes as many visits as fit its batch and never
straddles two phases."""

from collections.abc import Sequence

import numpy as np

from tasks.train.rollouts import Ints, Request, Rollouts, State
from tasks.train.settings import BatchSettings


def start(plan: dict[str, Ints], batch: BatchSettings) -> State:
    """The state: the plan's columns, the position in it, and the batch (`size`, counted in rollouts
    or prompts)."""
    return {
        **plan,
        "position": np.array(0),
        "size": np.array(batch.size),
        "counts_rollouts": np.array(batch.unit == "rollouts"),
    }


def next(state: State, so_far: Sequence[Rollouts], rng: np.random.Generator) -> Request | None:
    """The next step's visits, all at once; None when they were drawn, or when the plan is at its
    end."""
    first = int(state["position"])
    if so_far or at_end(state):
        return None
    sizes = visits_of_phase(state, first)
    num = num_visits(state, sizes, int(state["size"]))
    return take(state, first + np.arange(num), sizes[:num], first + num)


def at_end(state: State) -> bool:
    """Whether every visit was taken."""
    return int(state["position"]) == len(state["phase"])


def visits_of_phase(state: State, first: int) -> Ints:
    """Group sizes of the visits from `first` to the end of its phase."""
    phase = np.asarray(state["phase"][first:])
    same = int(np.argmax(phase != phase[0])) if (phase != phase[0]).any() else len(phase)
    return np.asarray(state["group_size"][first : first + same], dtype=np.int64)


def num_visits(state: State, sizes: Ints, room: int) -> int:
    """How many visits of groups of `sizes` fit into `room` (in the batch's unit), one at least."""
    cost = np.cumsum(sizes if state["counts_rollouts"] else np.ones_like(sizes))
    return max(int(np.searchsorted(cost, room, side="right")), 1)


def take(state: State, visits: Ints, counts: Ints, position: int) -> Request:
    """The request for `visits` (of one phase) with `counts` rollouts each; the plan is then at
    `position`."""
    state["position"] = np.array(position)
    first = int(visits[0])
    rows = np.asarray(state["prompt_row"][visits], dtype=np.int64)
    return Request(
        rows,
        np.asarray(counts, dtype=np.int64),
        int(state["pass"][first]),
        int(state["phase"][first]),
    )


def observe(state: State, rollouts: Rollouts) -> None:
    """A plan does not react."""


def progress(state: State) -> float:
    """The share of the plan's rollouts whose visits are past."""
    sizes = np.asarray(state["group_size"], dtype=np.float64)
    return float(sizes[: int(state["position"])].sum() / sizes.sum())


def describe(state: State) -> dict[str, float]:
    """What is worth recording of the state after a step."""
    return {}
