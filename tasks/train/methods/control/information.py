"""`information`: sample the prompts whose rollouts have the most information for their cost.

A rollout of a prompt with pass rate p adds information about the gradient in proportion to p (1 -
p), and costs 1 + c, where c, `update_cost`, is the cost of training on a rollout relative to
sampling it. If only the rarer outcome is trained on (`advantage: posterior` or `one_sided`), it
adds p (1 - p) (1 - m), with m = min(p, 1 - p), and costs 1 + c m. A prompt's worth is the larger of
these two ratios of information to cost: highest at pass rates near 0.2 and 0.8, a fifth lower at
0.5, and zero if p is 0 or 1. A step draws `candidates` batches of prompts at random, draws each
prompt's pass rate from its posterior (Thompson sampling, which explores unknown prompts), and takes
the prompts with the largest worth. With `candidates: 1` all prompts are equally likely.

The pass rates are estimated during the run (`methods/pass_rates.py`); no profile is read. The
plan gives the pool, the group sizes and the budget, not the order.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.common.params import ParamsError, at_least, settings
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control.prompt_pool import PoolControl, PromptPool
from tasks.train.methods.pass_rates import Belief, PassRates, PriorSettings

reads_prompts = True


@settings
class Settings:
    update_cost: float = 3.0  # cost of updating / generating a rollout; 3 in FLOPs
    candidates: int = 2  # candidate prompts per chosen prompt
    prior: PriorSettings = PriorSettings()  # same as in the advantage `posterior`

    def __post_init__(self) -> None:
        at_least(1, train__control__candidates=self.candidates)
        if not 0 <= self.update_cost < float("inf"):
            raise ParamsError(
                f"train.control.update_cost is {self.update_cost}; it is the cost of updating a "
                "rollout over that of generating it: 0 or more, 3 in FLOPs"
            )


@dataclass
class State(Belief):
    """The belief about pass rates; the number of rollouts spent."""

    spent: int = 0


class Method(PoolControl):
    def __init__(self, settings: Settings, plan: Plan, prompts: pl.DataFrame) -> None:
        self.settings, self.pool = settings, PromptPool.of(plan)
        self.rates = PassRates(settings.prior, prompts)
        self.state = self.rates.belief = State(**vars(self.rates.belief))

    def choose(self, room: int, rng: np.random.Generator) -> Ints:
        pool = self.pool
        wanted = room * self.settings.candidates
        num = len(pool.prompt_rows)
        drawn = pool.take(rng.choice(num, min(wanted, num), replace=False), wanted)
        drawn_rates = rng.beta(*self.rates.beta(pool.prompt_rows[drawn]))
        worths = worth(drawn_rates, self.settings.update_cost)
        return pool.take(drawn[np.argsort(-worths, kind="stable")], room)

    def observe(self, rollouts: Rollouts) -> None:
        graded = rollouts.where(~rollouts.is_error_B())
        is_correct_B = graded.is_correct_B().astype(np.float64)
        self.rates.add(graded.prompt_rows_Q, graded.group_B, is_correct_B)

    def describe(self) -> dict[str, float]:
        """Return the share of prompts sampled, and the mean predicted pass rate of all."""
        first, second = self.rates.beta(self.pool.prompt_rows)
        seen = self.state.trials[self.pool.prompt_rows] > 0
        return {
            "seen_rate": float(seen.mean()),
            "predicted_rate_mean": float((first / (first + second)).mean()),
        }


def worth(rates: Floats, update_cost: float) -> Floats:
    """Return the information per cost of a rollout, for prompts with these pass rates."""
    rarer = np.minimum(rates, 1.0 - rates)
    one_sided = (1.0 - rarer) / (1.0 + update_cost * rarer)
    return np.asarray(rates * (1.0 - rates) * np.maximum(one_sided, 1.0 / (1.0 + update_cost)))
