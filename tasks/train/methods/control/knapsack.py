"""`knapsack`: share out a step's rollouts by what they are worth (Knapsack RL, arXiv 2509.25849;
rule from digests).

N rollouts of a prompt with pass rate p are worth (1 - p^N - (1-p)^N) p (1-p)^2: the chance of a
mixed group times the information gain. A step takes the plan's next visits and shares the sum of
their group sizes out among them, between `smallest` and `largest` each, by dynamic programming.
Pass rates are those of the prompt's own earlier groups, older ones discounted. A prompt that was
not sampled yet, or never solved (worth 0 by the formula), keeps the plan's group size."""

from collections.abc import Sequence

import numpy as np

from tasks.common.params import at_least, share
from tasks.train.methods.control import plan
from tasks.train.methods.control.plan import progress
from tasks.train.rollouts import Floats, Ints, Request, Rollouts, State
from tasks.train.settings import BatchSettings

__all__ = ["describe", "next", "observe", "progress", "start"]


def start(
    columns: dict[str, Ints], batch: BatchSettings, *, smallest: int, largest: int, discount: float
) -> State:
    """The plan's state, and each prompt's discounted successes and trials."""
    at_least(1, train__control__smallest=smallest)
    at_least(smallest, train__control__largest=largest)
    share(train__control__discount=discount)
    seen = np.zeros((2, int(columns["prompt_row"].max()) + 1))
    bounds = np.array([smallest, largest])
    return {
        **plan.start(columns, batch),
        "seen": seen,
        "bounds": bounds,
        "discount": np.array(discount),
    }


def next(state: State, so_far: Sequence[Rollouts], rng: np.random.Generator) -> Request | None:
    """The plan's next visits with their rollouts shared out anew; None when drawn, or at the
    end."""
    request = plan.next(state, so_far, rng)
    if request is None:
        return None
    correct, trials = state["seen"][:, request.prompt_rows]
    known = correct > 0
    smallest, largest = state["bounds"].tolist()
    counts = request.counts.copy()
    budget = int(counts[known].sum())
    if known.sum() > 1 and smallest * known.sum() <= budget <= largest * known.sum():
        counts[known] = share_out(correct[known] / trials[known], budget, smallest, largest)
    return Request(request.prompt_rows, counts, request.pass_number, request.phase)


def worth(pass_rate: Floats, num: Ints) -> Floats:
    """[prompts, counts] what so many rollouts of each prompt are worth."""
    p, n = pass_rate[:, None], num[None, :]
    return np.asarray((1.0 - p**n - (1.0 - p) ** n) * p * (1.0 - p) ** 2)


def share_out(pass_rates: Floats, budget: int, smallest: int, largest: int) -> Ints:
    """Rollouts a prompt, `budget` in all, of the largest summed worth; among equals the first
    prompts get fewer."""
    sizes = np.arange(smallest, largest + 1)
    values = worth(pass_rates, sizes)
    best = np.full(budget + 1, -np.inf)  # of the prompts so far, by rollouts spent
    best[0] = 0.0
    choices = np.zeros((len(pass_rates), budget + 1), dtype=np.int64)
    for prompt, value in enumerate(values):
        longer = np.full(budget + 1, -np.inf)
        for size, gain in zip(sizes[sizes <= budget].tolist(), value, strict=False):
            candidate = np.concatenate([np.full(size, -np.inf), best[: budget + 1 - size] + gain])
            better = candidate > longer
            longer[better], choices[prompt][better] = candidate[better], size
        best = longer
    counts, left = np.zeros(len(pass_rates), dtype=np.int64), budget
    for prompt in reversed(range(len(pass_rates))):
        counts[prompt] = choices[prompt][left]
        left -= int(counts[prompt])
    return counts


def observe(state: State, rollouts: Rollouts) -> None:
    """Add the step's groups to what was seen of their prompts."""
    graded, num_groups = ~rollouts.is_error_B(), len(rollouts.prompt_rows_Q)
    group_B = rollouts.group_B[graded]
    correct_Q = np.bincount(group_B, rollouts.rewards_B[graded], num_groups)
    seen = state["seen"].copy()
    for row, correct, size in zip(
        rollouts.prompt_rows_Q, correct_Q, np.bincount(group_B, minlength=num_groups), strict=True
    ):
        seen[:, row] = seen[:, row] * state["discount"] + [correct, size]
    state["seen"] = seen


def describe(state: State) -> dict[str, float]:
    """The share of prompts that were solved so far."""
    return {"solved_prompts_rate": float((state["seen"][0] > 0).mean())}
