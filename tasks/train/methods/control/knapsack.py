"""`knapsack`: distribute a step's rollouts by their worth (Knapsack RL, arXiv 2509.25849; rule from
summaries of the paper).

The worth of N rollouts of a prompt with pass rate p is (1 - p^N - (1-p)^N) p (1-p)^2: the chance of
a mixed group times the information gain. A step takes the plan's next visits and distributes the
sum of their group sizes among them, between `smallest` and `largest` each, by dynamic programming.
Pass rates come from the prompt's own earlier groups, with older ones discounted. A prompt that was
not sampled yet, or never solved (worth 0 by the formula), keeps the plan's group size."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tasks.common.params import ParamsError, at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import plan as follow
from tasks.train.slots import SoFar


@settings
class Settings:
    smallest: int = 2  # smallest group
    largest: int = 32  # largest group
    discount: float = 0.5  # factor of earlier outcomes per visit

    def __post_init__(self) -> None:
        at_least(1, train__control__smallest=self.smallest)
        at_least(self.smallest, train__control__largest=self.largest)
        share(train__control__discount=self.discount)


@dataclass
class State:
    """The next visit, and each prompt's discounted successes and trials."""

    correct: Floats
    trials: Floats
    position: int = 0


class Method(follow.Method):
    """The control `knapsack`, and the base of others with limits `smallest` and `largest`."""

    def __init__(self, settings: Any, plan: Plan) -> None:
        self.settings, self.plan = settings, plan
        least, most = plan.group_sizes_V.min(), plan.group_sizes_V.max()
        if most < settings.smallest or least > settings.largest:
            raise ParamsError(
                f"train.control: the plan has groups of {least} to {most}, all outside smallest "
                f"and largest, {settings.smallest} to {settings.largest}, so that no rollout could "
                "be moved: change these two, or the group size of allocate"
            )
        self.prompt_rows = np.unique(plan.prompt_rows_V)
        self.state = State(np.zeros(plan.num_prompts), np.zeros(plan.num_prompts))

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the plan's next visits with their rollouts redistributed; None once they are
        sampled, or at the plan's end."""
        if (request := super().next(so_far, rng)) is None:
            return None
        return replace(request, counts=self.share_out(request.prompt_rows, request.counts))

    def share_out(self, prompt_rows: Ints, counts: Ints) -> Ints:
        """Return `counts`, redistributed among prompts with a rate if the bounds allow it."""
        smallest, largest = self.settings.smallest, self.settings.largest
        rates = self.rates(prompt_rows)
        known = ~np.isnan(rates)
        counts, budget = counts.copy(), int(counts[known].sum())
        if known.sum() > 1 and smallest * known.sum() <= budget <= largest * known.sum():
            counts[known] = self.best_counts(rates[known], budget, smallest, largest)
        return counts

    def rates(self, prompt_rows: Ints) -> Floats:
        """Return the pass rate of each prompt; NaN for one that keeps the plan's size."""
        correct, trials = self.state.correct[prompt_rows], self.state.trials[prompt_rows]
        return np.where(correct > 0, correct / np.maximum(trials, 1.0), np.nan)

    @staticmethod
    def best_counts(pass_rates: Floats, budget: int, smallest: int, largest: int) -> Ints:
        """Return the numbers of rollouts per prompt, `budget` in total, that maximise the summed
        worth; of prompts with equal pass rates, the last get fewer."""
        sizes = np.arange(smallest, largest + 1)
        # the best sum of the prompts so far, by rollouts spent; fewer than none are impossible
        best = np.where(np.arange(largest + budget + 1) == largest, 0.0, -np.inf)
        before = largest + np.arange(budget + 1)[:, None] - sizes
        choices = np.zeros((len(pass_rates), budget + 1), dtype=np.int64)
        for prompt, gains in enumerate(worth(pass_rates, sizes)):
            totals = best[before] + gains
            choices[prompt] = sizes[totals.argmax(axis=1)]
            best[largest:] = totals.max(axis=1)
        counts = np.zeros(len(pass_rates), dtype=np.int64)
        for prompt in reversed(range(len(pass_rates))):
            counts[prompt] = choices[prompt, budget - counts.sum()]
        return counts

    def observe(self, rollouts: Rollouts) -> None:
        size_Q, correct_Q = rollouts.graded_Q()
        state, discount = self.state, self.settings.discount
        for group in np.flatnonzero(size_Q):  # those with graded rollouts
            row = rollouts.prompt_rows_Q[group]
            state.correct[row] = state.correct[row] * discount + correct_Q[group]
            state.trials[row] = state.trials[row] * discount + size_Q[group]

    def describe(self) -> dict[str, float]:
        """Return the share of the plan's prompts that were solved so far."""
        return {"solved_prompts_rate": float((self.state.correct[self.prompt_rows] > 0).mean())}


def worth(pass_rate: Floats, num: Ints) -> Floats:
    """Return [prompts, counts] the worth of `num` rollouts of each prompt."""
    p, n = pass_rate[:, None], num[None, :]
    return np.asarray((1.0 - p**n - (1.0 - p) ** n) * p * (1.0 - p) ** 2)
