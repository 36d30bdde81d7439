"""`sagc`: group sizes under a budget of stragglers, after SAGC (arXiv 2606.02218).

A RECONSTRUCTION from the paper's abstract and digests, whose full text was not available: not the
authors' verified algorithm. A synchronous step waits for its longest rollout, and the larger a
group, the likelier it holds a straggler: a rollout longer than `threshold` times the running median
of all lengths (running, because against its own median a group of two could never have one). A Beta
posterior per size of `group_sizes` learns that risk; the step's size maximises log2(G) /
log2(G_max) minus the multiplier times the risk; the multiplier rises with every step above
`budget`, falls below it, and is capped: a budget under the smallest size's own rate is infeasible,
the size then rests at the smallest and `multiplier` at its cap. The plan says whom to visit and how
many rollouts at most; the rollouts of a step stay what train.batch says by taking more prompts.
Fewer stragglers are not more rollouts a second: compare tokens a second."""

from collections.abc import Sequence

import numpy as np

from tasks.common.params import ParamsError, share
from tasks.train.methods.control import plan
from tasks.train.methods.control.plan import progress
from tasks.train.rollouts import Floats, Ints, Request, Rollouts, State
from tasks.train.settings import BatchSettings

__all__ = ["describe", "next", "observe", "progress", "start"]

MEDIAN_WINDOW = 1024  # rollouts whose lengths make the running median


def start(
    columns: dict[str, Ints],
    batch: BatchSettings,
    *,
    group_sizes: list[int],
    threshold: float,
    budget: float,
    step: float,
    memory: float,
    max_multiplier: float,
) -> State:
    """The plan's state, the posteriors, the multiplier and the lengths of the latest rollouts."""
    sizes = np.array(sorted(set(group_sizes)), dtype=np.int64)
    if not group_sizes or len(sizes) < len(group_sizes) or sizes[0] < 2:
        raise ParamsError(
            f"train.control.group_sizes is {group_sizes}: it must be distinct sizes of at least 2"
        )
    share(train__control__budget=budget, train__control__memory=memory)
    return {
        **plan.start(columns, batch),
        "candidates": sizes,
        "posterior": np.ones((2, len(sizes))),  # stragglers and others, from a uniform prior
        "multiplier": np.array(0.0),
        "settings": np.array([threshold, budget, step, memory, max_multiplier]),
        "lengths": np.zeros(0),
        "last": np.array([0.0, 0.0]),  # the last step's size and straggler rate
    }


def next(state: State, so_far: Sequence[Rollouts], rng: np.random.Generator) -> Request | None:
    """The plan's next visits, their groups cut to the size chosen for the step; None when drawn, or
    at the end."""
    if so_far or plan.at_end(state):
        return None
    size = choose_size(state, rng)
    state["last"] = np.array([size, state["last"][1]])
    first = int(state["position"])
    sizes = np.minimum(plan.visits_of_phase(state, first), size)
    num = plan.num_visits(state, sizes, int(state["size"]))
    return plan.take(state, first + np.arange(num), sizes[:num], first + num)


def choose_size(state: State, rng: np.random.Generator) -> int:
    """The size of the largest benefit minus priced risk, risks drawn from their posteriors
    (Thompson sampling)."""
    sizes = state["candidates"]
    risk = np.maximum.accumulate(rng.beta(*state["posterior"]))  # more rollouts, no smaller a risk
    value = np.log2(sizes) / np.log2(sizes[-1]) - float(state["multiplier"]) * risk
    return int(sizes[np.argmax(value)])


def observe(state: State, rollouts: Rollouts) -> None:
    """Learn from the step's stragglers."""
    threshold, budget, step, memory, cap = state["settings"]
    lengths = rollouts.completion_tokens_B()
    state["lengths"] = np.concatenate([state["lengths"], lengths])[-MEDIAN_WINDOW:].astype(
        np.float64
    )
    size_Q = np.bincount(rollouts.group_B)
    straggles_Q = stragglers(
        lengths, rollouts.group_B, threshold * float(np.median(state["lengths"]))
    )
    posterior = 1.0 + memory * (state["posterior"] - 1.0)
    for index, size in enumerate(
        state["candidates"]
    ):  # groups that the plan cut smaller tell of no candidate
        posterior[:, index] += [
            straggles_Q[size_Q == size].sum(),
            (~straggles_Q[size_Q == size]).sum(),
        ]
    state["posterior"] = posterior
    rate = float(straggles_Q.mean())
    state["last"] = np.array([state["last"][0], rate])
    state["multiplier"] = np.array(
        np.clip(float(state["multiplier"]) + step * (rate - budget), 0.0, cap)
    )


def stragglers(lengths_B: Ints, group_B: Ints, limit: float) -> np.ndarray:
    """[Q] whether a group's longest rollout is longer than `limit`."""
    longest: Floats = np.zeros(int(group_B.max()) + 1)
    np.maximum.at(longest, group_B, lengths_B)
    return longest > limit


def describe(state: State) -> dict[str, float]:
    """The step's group size, its straggler rate, and the price of risk."""
    size, rate = state["last"].tolist()
    return {"group_size": size, "straggler_rate": rate, "multiplier": float(state["multiplier"])}
