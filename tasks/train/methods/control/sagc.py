"""`sagc`: group sizes under a budget of stragglers, after SAGC (arXiv 2606.02218).

A RECONSTRUCTION from the paper's abstract and summaries of it, since the full text was not
available: not the authors' verified algorithm. A synchronous step waits for its longest rollout. A
larger group is more likely to contain a straggler: a rollout longer than `threshold` times the
running median of all lengths. (With its own median, a group of two could never contain one if the
threshold is 2 or more.) A Beta posterior per size of `group_sizes` estimates that risk. The group
size G of a step maximises log2(G) / log2(G_max) minus the risk times a multiplier (its price). The
multiplier rises at rates above `budget`, falls below it, and is capped. A budget below the smallest
size's straggler rate cannot be met: the size then stays at the smallest, the multiplier at
`max_multiplier`. The plan sets the prompts and the largest group sizes; with smaller groups a step
takes more prompts, to fill `train.batch`. Fewer stragglers need not mean more rollouts per second:
compare tokens per second."""

from dataclasses import dataclass, field

import numpy as np

from tasks.common.params import ParamsError, above_zero, at_least, settings, share
from tasks.train.data.columns import Bools, Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import plan as follow
from tasks.train.methods.control.dapo import mixed_size
from tasks.train.slots import SoFar

MEDIAN_WINDOW = 1024  # rollouts in the running median of lengths


@settings
class Settings:
    group_sizes: list[int] = field(default_factory=lambda: [4, 8, 16])  # allowed group sizes
    threshold: float = 2.0  # factor of the median length above which a rollout is a straggler
    budget: float = 0.2  # share of groups that may have a straggler
    step: float = 0.2  # change of the price of risk per step and unit of excess rate
    memory: float = 0.99  # factor of earlier counts per step
    max_multiplier: float = 20.0  # maximum price of risk
    max_refills: int = 0  # further requests per step while mixed groups are missing, as in dapo

    def __post_init__(self) -> None:
        sizes = self.group_sizes
        if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 2:
            raise ParamsError(
                f"train.control.group_sizes is {sizes}: it must be distinct sizes of at least 2"
            )
        share(train__control__budget=self.budget, train__control__memory=self.memory)
        above_zero(train__control__threshold=self.threshold)
        at_least(0, train__control__step=self.step, train__control__max_refills=self.max_refills)
        at_least(0, train__control__max_multiplier=self.max_multiplier)


@dataclass
class State:
    """The next visit; per group size, the counts of groups with and without a straggler, from a
    uniform prior; the price of risk; the lengths of the latest rollouts; the last step's group size
    and straggler rate."""

    stragglers: Floats
    others: Floats
    lengths: Floats
    position: int = 0
    multiplier: float = 0.0
    last_size: int = 0
    last_rate: float = 0.0


class Method(follow.Method):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan = settings, plan
        self.sizes = np.array(sorted(settings.group_sizes), dtype=np.int64)
        self.state = State(np.ones(len(self.sizes)), np.ones(len(self.sizes)), np.zeros(0))
        self.asks_again = settings.max_refills > 0

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the plan's next visits, their groups cut to the size chosen for the step, then up
        to `max_refills` further ones of the phase while mixed groups are missing; None after them,
        or at the plan's end."""
        plan, state = self.plan, self.state
        first, last = plan.start(state.position, so_far.done), state.position - 1
        if first is None or so_far.num_requests > self.settings.max_refills:
            return None
        room = so_far.room(plan.batch)
        if so_far.rollouts is not None:
            room = min(plan.batch.size - so_far.replayed, room)
            room -= mixed_size(plan, so_far.rollouts)
            if room <= 0 or plan.phases_V[first] != plan.phases_V[last]:
                return None
        visits = plan.window(first, room)
        if so_far.rollouts is None:
            state.last_size = self.choose_size(rng, int(plan.group_sizes_V[visits].max()))
        sizes = np.minimum(plan.group_sizes_V[visits], state.last_size)
        num = plan.num_visits(sizes, room)
        state.position = first + num
        return plan.request(visits[:num], sizes[:num])

    def choose_size(self, rng: np.random.Generator, largest: int) -> int:
        """Return the size with the largest benefit minus priced risk, with risks drawn from their
        posteriors (Thompson sampling). Sizes above the plan's `largest` would be cut to it."""
        risks = rng.beta(self.state.stragglers, self.state.others)
        risk = np.maximum.accumulate(risks)  # the risk does not fall with more rollouts
        benefit = np.log2(self.sizes) / np.log2(self.sizes[-1])
        values = benefit - self.state.multiplier * risk
        num = max(int(np.searchsorted(self.sizes, largest, side="right")), 1)
        return min(int(self.sizes[np.argmax(values[:num])]), largest)

    def observe(self, rollouts: Rollouts) -> None:
        """Update the risks and the price with the step's stragglers."""
        settings, state = self.settings, self.state
        lengths = rollouts.completion_tokens_B()
        state.lengths = np.concatenate([state.lengths, lengths])[-MEDIAN_WINDOW:].astype(np.float64)
        limit = settings.threshold * float(np.median(state.lengths))
        straggles_Q = has_straggler(lengths, rollouts.group_B, limit)
        size_Q = np.bincount(rollouts.group_B)
        # discount towards the prior; groups of other, smaller sizes in the plan do not count
        state.stragglers = 1.0 + settings.memory * (state.stragglers - 1.0)
        state.others = 1.0 + settings.memory * (state.others - 1.0)
        for index, size in enumerate(self.sizes):
            state.stragglers[index] += straggles_Q[size_Q == size].sum()
            state.others[index] += (~straggles_Q[size_Q == size]).sum()
        state.last_rate = float(straggles_Q.mean())
        price = state.multiplier + settings.step * (state.last_rate - settings.budget)
        state.multiplier = float(np.clip(price, 0.0, settings.max_multiplier))

    def describe(self) -> dict[str, float]:
        """Return the step's group size, its straggler rate, and the multiplier of the risk."""
        return {
            "group_size": float(self.state.last_size),
            "straggler_rate": self.state.last_rate,
            "multiplier": self.state.multiplier,
        }


def has_straggler(lengths_B: Ints, group_B: Ints, limit: float) -> Bools:
    """Return [Q] whether a group's longest rollout is longer than `limit`."""
    longest: Floats = np.zeros(int(group_B.max()) + 1)
    np.maximum.at(longest, group_B, lengths_B)
    return np.asarray(longest > limit)
