"""`experience`: part of every step samples partly solved prompts again, each with a stored success
(ExGRPO, arXiv 2510.02245; rule from the authors' code). Use with `replay: successes`.

A prompt's bucket is the number k of correct rollouts in its latest group of n, if 0 < k < n; a
prompt with an all-correct group is retired for good. After the first step in which more than
`start` of the rollouts are correct, up to `share` of the plan's visits are replaced: a bucket is
drawn with weight N(k; n/2, 1), and a prompt in it uniformly, without replacement. Its group has one
fewer fresh rollout, to make room for the stored one. The plan sets the order of the other prompts,
the group sizes and the budget. Only fresh rollouts count for buckets."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import settings, share
from tasks.train.data.columns import Bools, Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control.plan import next_visits
from tasks.train.methods.control.prompt_pool import PoolControl, PromptPool
from tasks.train.slots import SoFar

stored_share = "share"


@settings
class Settings:
    share: float = 0.5  # maximum share of a step's visits
    start: float = 0.35  # share of correct rollouts in a step above which experience starts

    def __post_init__(self) -> None:
        share(train__control__share=self.share, train__control__start=self.start)


@dataclass
class State:
    """For every prompt, the number of correct rollouts in its latest group, and that group's size
    (-1 if retired); the plan's next visit, rollouts spent, and whether experience has started."""

    correct: Ints
    sizes: Ints
    position: int = 0
    spent: int = 0
    has_started: bool = False


class Method(PoolControl):
    needs_stored = True

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan, self.pool = settings, plan, PromptPool.of(plan)
        nothing = np.zeros(plan.num_prompts, dtype=np.int64)
        self.state = State(nothing, nothing.copy())

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the plan's next visits, then groups that each get a stored rollout; None once all
        are sampled, or if the plan's rollouts are spent."""
        plan, pool, state = self.plan, self.pool, self.state
        first = plan.start(state.position, so_far.done)
        if so_far.num_requests or first is None or not pool.room(so_far, state.spent):
            return None
        visits = next_visits(plan, first, so_far)
        again = self.again(visits, rng)
        visits = visits[: len(visits) - len(again)]
        state.position = first + len(visits)
        rows = np.concatenate([plan.prompt_rows_V[visits], pool.prompt_rows[again]])
        sizes = np.concatenate([plan.group_sizes_V[visits], pool.group_sizes[again] - 1])
        sizes = pool.cut(sizes, so_far, state.spent)
        joined, is_sampled = np.arange(len(rows)) >= len(visits), sizes > 0
        state.spent += int(sizes.sum())
        where = int(plan.passes_V[first]), int(plan.phases_V[first])
        return GroupRequest(rows[is_sampled], sizes[is_sampled], *where, joined=joined[is_sampled])

    def again(self, visits: Ints, rng: np.random.Generator) -> Ints:
        """Return the prompts (as pool indices) that replace the last of these visits."""
        most = int(self.settings.share * len(visits)) if self.state.has_started else 0
        if not most:
            return np.zeros(0, dtype=np.int64)
        places = np.flatnonzero(self.is_open() & (self.pool.group_sizes > 1))
        rows = self.pool.prompt_rows[places]
        weights = log_weights(self.state.correct[rows], self.state.sizes[rows])
        # the largest sums of log-weight and Gumbel noise are a draw without replacement
        keys = weights + rng.gumbel(size=len(places))
        chosen = places[np.argsort(-keys, kind="stable")]
        is_new = ~np.isin(self.pool.prompt_rows[chosen], self.plan.prompt_rows_V[visits])
        return chosen[is_new][:most]

    def is_open(self) -> Bools:
        """Return whether each prompt of the pool is in a bucket."""
        correct, sizes = (
            values[self.pool.prompt_rows] for values in (self.state.correct, self.state.sizes)
        )
        return np.asarray((correct > 0) & (correct < sizes))

    def observe(self, rollouts: Rollouts) -> None:
        state, (size_Q, correct_Q) = self.state, rollouts.graded_Q()
        state.has_started |= bool(correct_Q.sum() > self.settings.start * size_Q.sum())
        known_Q = (size_Q > 0) & (state.sizes[rollouts.prompt_rows_Q] >= 0)
        rows = rollouts.prompt_rows_Q[known_Q]
        state.correct[rows] = correct_Q[known_Q]
        state.sizes[rows] = size_Q[known_Q]
        state.sizes[rollouts.prompt_rows_Q[(size_Q > 0) & (correct_Q == size_Q)]] = -1

    def describe(self) -> dict[str, float]:
        """Return the share of prompts that may be sampled again, and the share retired."""
        is_retired = self.state.sizes[self.pool.prompt_rows] < 0
        return {"open_rate": float(self.is_open().mean()), "retired_rate": float(is_retired.mean())}


def log_weights(correct: Ints, sizes: Ints) -> Floats:
    """Return the log-probability of each prompt in the first draw, up to a constant: the density of
    its bucket, which may be too small for a float, shared among the bucket's prompts."""
    density = -((correct - sizes / 2.0) ** 2) / 2.0
    return np.asarray(density - np.log(np.bincount(correct)[correct]))
