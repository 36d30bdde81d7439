"""`dots`: sample prompts with a predicted pass rate near one half (difficulty-targeted online
selection; DOTS, arXiv 2506.05316).

Prompts are drawn without replacement with weight exp(-|p - 1/2| / temperature), where p is the mean
of a Beta posterior of the prompt's own outcomes, discounted by `memory` per visit. Prompts that
were never sampled have p = 1/2, so they are tried first. The plan gives the pool, the group sizes
and the budget, not the order. Use with `replay: recent`, the paper's rollout replay. Left out: the
predictor over the embeddings of 256 reference prompts, which the paper samples every two steps."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import above_zero, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control.prompt_pool import PoolControl, PromptPool


@settings
class Settings:
    temperature: float = 0.05  # temperature of the choice by predicted pass rate
    memory: float = 0.7  # factor of earlier outcomes per visit

    def __post_init__(self) -> None:
        share(train__control__memory=self.memory)
        above_zero(train__control__temperature=self.temperature)


@dataclass
class State:
    """Every prompt's discounted numbers of correct and other outcomes; the rollouts spent."""

    correct: Floats
    others: Floats
    spent: int = 0


class Method(PoolControl):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.pool = settings, PromptPool.of(plan)
        self.state = State(np.zeros(plan.num_prompts), np.zeros(plan.num_prompts))

    def choose(self, room: int, rng: np.random.Generator) -> Ints:
        pool = self.pool
        weight = -np.abs(self.pass_rates() - 0.5) / self.settings.temperature
        # the largest sums of log-weight and Gumbel noise are a draw without replacement
        keys = weight[pool.prompt_rows] + rng.gumbel(size=len(pool.prompt_rows))
        return pool.take(np.argsort(-keys, kind="stable"), room)

    def pass_rates(self) -> Floats:
        """Return the mean of each prompt's posterior, by prompt row, from a uniform prior."""
        state = self.state
        return np.asarray((state.correct + 1.0) / (state.correct + state.others + 2.0))

    def observe(self, rollouts: Rollouts) -> None:
        size_Q, correct_Q = rollouts.graded_Q()
        state, memory = self.state, self.settings.memory
        is_known_Q = size_Q > 0  # a group without graded rollouts has no outcome
        known = (values[is_known_Q] for values in (rollouts.prompt_rows_Q, size_Q, correct_Q))
        rows, size_Q, correct_Q = known
        np.multiply.at(state.correct, rows, memory)
        np.multiply.at(state.others, rows, memory)
        np.add.at(state.correct, rows, correct_Q)
        np.add.at(state.others, rows, size_Q - correct_Q)

    def describe(self) -> dict[str, float]:
        """Return the share of the plan's prompts sampled so far."""
        rows, state = self.pool.prompt_rows, self.state
        return {"seen_rate": float((state.correct[rows] + state.others[rows] > 0).mean())}
