"""`gdro`: larger groups for pass rates with a larger variance of outcomes (Rollout-GDRO, arXiv
2601.19280; rule from summaries).

A bin has the prompts of similar pass rates (`methods/rate_bins.py`); p is the mean of their rates.
A step takes the plan's next visits and distributes the sum of their group sizes. Sizes are in
proportion to sqrt(p (1 - p)), between `smallest` and `largest`, and rounded by largest remainder:
this minimises the summed variance p (1 - p) / size. If p is 0 or 1, the size is `smallest`, unless
all others are `largest`. A prompt without a bin keeps the plan's group size. Left out: the EXP3P
arms and the shadow price, whose target is this square-root rule."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import group_means
from tasks.train.data.plan import Plan
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import knapsack
from tasks.train.methods.rate_bins import learn


@settings
class Settings:
    width: float = 0.1  # width of a bin of pass rates
    hysteresis: float = 0.02  # distance outside its bin at which a prompt changes bins
    memory: float = 0.5  # weight of earlier groups in a pass rate
    smallest: int = 2  # smallest group
    largest: int = 12  # largest group

    def __post_init__(self) -> None:
        above_zero(train__control__width=self.width)
        share(train__control__width=self.width, train__control__memory=self.memory)
        at_least(0, train__control__hysteresis=self.hysteresis)
        at_least(1, train__control__smallest=self.smallest)
        at_least(self.smallest, train__control__largest=self.largest)


@dataclass
class State:
    """The next visit; every prompt's pass rate, and its bin (-1: none)."""

    rates: Floats
    bins: Ints
    position: int = 0


class Method(knapsack.Method):
    def __init__(self, settings: Settings, plan: Plan) -> None:
        super().__init__(settings, plan)
        self.state = State(np.zeros(plan.num_prompts), np.full(plan.num_prompts, -1))

    def rates(self, prompt_rows: Ints) -> Floats:
        """Return the mean rate of each prompt's bin; NaN without a bin."""
        bins, is_known = self.state.bins, self.state.bins >= 0
        means, _ = group_means(self.state.rates[is_known], bins[is_known])
        return np.asarray(np.append(means, np.nan)[bins[prompt_rows]])

    @staticmethod
    def best_counts(pass_rates: Floats, budget: int, smallest: int, largest: int) -> Ints:
        """Return the numbers of rollouts per prompt, `budget` in total (see the module)."""
        # the total is piecewise linear in the scale of the roots, which must not be 0
        roots = np.sqrt(np.maximum(pass_rates * (1.0 - pass_rates), 1e-12))
        scales = np.sort(np.outer([smallest, largest], 1.0 / np.unique(roots)).ravel())
        totals = np.clip(np.outer(scales, roots), smallest, largest).sum(axis=1)
        sizes = np.clip(np.interp(budget, totals, scales) * roots, smallest, largest)
        counts: Ints = np.floor(sizes).astype(np.int64)
        counts[np.argsort(counts - sizes, kind="stable")[: budget - counts.sum()]] += 1
        return counts

    def observe(self, rollouts: Rollouts) -> None:
        learn(self.state.rates, self.state.bins, rollouts, self.settings)

    def describe(self) -> dict[str, float]:
        """Return the share of the plan's prompts that have a bin."""
        return {"seen_rate": float((self.state.bins[self.prompt_rows] >= 0).mean())}
