"""`pools`: sample prompts by the mean reward of their last group, and retire solved ones
(framework practice; POLARIS, ScaleRL and open-instruct have it).

A prompt is drawn with the weight of its pool: `hard` up to `hard_below`, `easy` above `easy_above`,
1 between them and for a prompt that was never sampled. A prompt whose last group has a mean above
`retire_above` retires: it is drawn again only if the others do not fill a batch. With weights of 1
and without retirement all prompts are equally likely. The plan gives the pool, the group sizes and
the budget, not the order."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.columns import Bools, Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control.prompt_pool import PoolControl, PromptPool


@settings
class Settings:
    hard: float = 0.2  # weight of a prompt with a mean reward of at most hard_below
    easy: float = 0.2  # weight of a prompt with a mean reward above easy_above
    hard_below: float = 0.25
    easy_above: float = 0.75
    retire_above: float | None = 0.9  # null: no prompt is retired

    def __post_init__(self) -> None:
        above_zero(train__control__hard=self.hard, train__control__easy=self.easy)
        share(
            train__control__hard_below=self.hard_below,
            train__control__easy_above=self.easy_above,
            train__control__retire_above=1.0 if self.retire_above is None else self.retire_above,
        )
        at_least(self.hard_below, train__control__easy_above=self.easy_above)


@dataclass
class State:
    """Every prompt's mean reward in its last group, -1 before the first, and whether it is retired;
    the rollouts spent."""

    last: Floats
    retired: Bools
    spent: int = 0


class Method(PoolControl):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.pool = settings, PromptPool.of(plan)
        num = plan.num_prompts
        self.state = State(np.full(num, -1.0), np.zeros(num, dtype=np.bool_))

    def choose(self, room: int, rng: np.random.Generator) -> Ints:
        # the largest sums of log-weight and Gumbel noise are a draw without replacement
        rows = self.pool.prompt_rows
        keys = np.log(self.weights(rows)) + rng.gumbel(size=len(rows))
        return self.pool.take(np.lexsort((-keys, self.state.retired[rows])), room)

    def weights(self, rows: Ints) -> Floats:
        """Return the weight of each of these prompts."""
        settings, last = self.settings, self.state.last[rows]
        weight = np.where((last >= 0) & (last <= settings.hard_below), settings.hard, 1.0)
        return np.where(last > settings.easy_above, settings.easy, weight)

    def observe(self, rollouts: Rollouts) -> None:
        size_Q, correct_Q = rollouts.graded_Q()
        known_Q = size_Q > 0  # a group without graded rollouts has no mean
        rows, mean_Q = rollouts.prompt_rows_Q[known_Q], correct_Q[known_Q] / size_Q[known_Q]
        self.state.last[rows] = mean_Q
        if self.settings.retire_above is not None:
            self.state.retired[rows[mean_Q > self.settings.retire_above]] = True

    def describe(self) -> dict[str, float]:
        """Return the share of the plan's prompts that are retired."""
        return {"retired_rate": float(self.state.retired[self.pool.prompt_rows].mean())}
