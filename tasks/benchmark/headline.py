"""Which recipe pays: the least compute at which a recipe's tuned frontier reaches the reference's
accuracy, as a ratio, with its interval.

A recipe's frontier on a family is the monotone curve through (compute, test accuracy) at its
budgets, each the mean over the seeds at the settings chosen there. The targets are the accuracies
that the reference reaches at its own budgets. The interval is a hierarchical bootstrap: prompts
are drawn once for all recipes, which answer the same ones, and seeds for every recipe and budget.

Profiling is charged in full to who reads the profile; `uses` says over how many runs it is
amortised. A ratio above 1 means less compute than the reference. A target that a frontier does not
reach is said to be so, and counts as a ratio of 0 in the draws; one that is below a frontier's
first point is counted at that point's compute, which makes the ratio a lower bound.

Legend: D draws, S seeds, P test prompts, T targets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from tasks.benchmark.protocol import Protocol
from tasks.benchmark.results import Line, counts_of
from tasks.common.files import ArtifactError
from tasks.common.ledger import ACCOUNTS

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
# modelled seconds, also for an update that costs half and twice as much beside generating
UPDATE_FACTORS = {
    "device_seconds": 1.0,
    "device_seconds, updates half": 0.5,
    "device_seconds, updates double": 2.0,
}
MEASURES = ("rollouts", *ACCOUNTS, *UPDATE_FACTORS, "cpu_seconds")


@dataclass(frozen=True)
class Ratio:
    """How many times less compute than the reference; None where the target is not reached. Below
    the first point of the frontier the true ratio is larger (`is_bound`), and so may the
    upper end be where it is `most`, the largest that the points can show. `reached` is the share of
    draws that reach the target."""

    value: float | None
    low: float | None
    high: float | None
    reached: float
    is_bound: bool
    most: float


@dataclass(frozen=True)
class Runs:
    """A recipe on a family: by budget the test lines of its seeds."""

    recipe: str
    by_budget: Mapping[int, Sequence[Line]]

    def cost(self, measure: str, uses: float = 1.0) -> Floats:
        """The mean compute at each budget, with the profile's share."""
        return np.array(
            [
                np.mean([cost_of(line, measure, uses) for line in lines])
                for lines in self.by_budget.values()
            ]
        )

    def reads_profile(self) -> bool:
        """Whether the recipe is charged for profiling."""
        return any(line["rollouts_profile"] for lines in self.by_budget.values() for line in lines)

    def rates(self) -> list[Floats]:
        """At each budget, [seeds, P] the pass rate of every test prompt."""
        return [
            np.array(
                [
                    np.array(counts_of(line["correct"])) / np.maximum(counts_of(line["trials"]), 1)
                    for line in lines
                ]
            )
            for lines in self.by_budget.values()
        ]


def cost_of(line: Line, measure: str, uses: float = 1.0) -> float:
    """What a run cost in one account."""
    if measure == "rollouts":
        return float(line["rollouts"] + line["rollouts_profile"] / uses)
    if measure in UPDATE_FACTORS:
        factor = UPDATE_FACTORS[measure]
        parts = (line["device_seconds"], line["device_seconds_profile"])
        own, profiled = (
            sum(seconds * (factor if part == "update" else 1.0) for part, seconds in each.items())
            for each in parts
        )
        return float(own + profiled / uses)
    if measure == "cpu_seconds":
        return float(line["cpu_seconds"])
    return float(line["flops"][measure] + line["flops_profile"][measure] / uses)


def runs_of(protocol: Protocol, family: str, results: Sequence[Line]) -> dict[str, Runs]:
    """The recipes that have a test line of every seed at some budget. Raises ArtifactError where a
    budget has lines of several settings: they would be no one's seeds."""
    found: dict[str, Runs] = {}
    for contestant in protocol.contestants:
        by_budget: dict[int, list[Line]] = {}
        for line in results:
            is_mine = (line["family"], line["recipe"]) == (family, contestant.recipe)
            if is_mine and line["measures"] == "test" and "failed" not in line:
                by_budget.setdefault(line["budget"], []).append(line)
        num = len(protocol.seeds)
        whole = {b: by_budget[b] for b in sorted(by_budget) if len(by_budget[b]) >= num}
        for budget, lines in whole.items():
            settings = {json.dumps(line["settings"], sort_keys=True) for line in lines}
            if len(lines) > num or len(settings) > 1:
                raise ArtifactError(
                    f"{family} {contestant.recipe} at {budget} has {len(lines)} test lines of "
                    f"{len(settings)} settings for {num} seeds: delete those that are not its own"
                )
        if whole:
            found[contestant.recipe] = Runs(contestant.recipe, whole)
    return found


def reach(cost: Floats, accuracy: Floats, target: float) -> float:
    """The compute at which the monotone curve through these points reaches the target, between them
    on a logarithmic axis; infinite where it does not."""
    best = np.maximum.accumulate(accuracy)
    place = int(np.searchsorted(best, target - 1e-12))
    if place == len(best):
        return float("inf")
    if place == 0:
        return float(cost[0])
    share = (target - best[place - 1]) / (best[place] - best[place - 1])
    return float(np.exp(np.interp(share, [0, 1], np.log(cost[place - 1 : place + 1]))))


@dataclass(frozen=True)
class Draws:
    """The accuracies of a recipe and of the reference at their budgets: as measured, and [D,
    budgets] in draws of prompts and seeds."""

    means: tuple[Floats, Floats]
    drawn: tuple[Floats, Floats]


def resample(mine: Runs, reference: Runs, num_draws: int) -> Draws:
    """Prompts are drawn once for both, which answer the same ones; seeds for each budget. Draws of
    S seeds spread too little by sqrt((S - 1) / S), and a normal quantile is too small for S - 1
    degrees of freedom: their deviations are widened by both."""
    rng = np.random.default_rng(0)
    mine_rates, reference_rates = mine.rates(), reference.rates()
    num_prompts = mine_rates[0].shape[1]
    share = np.full(num_prompts, 1.0 / num_prompts)
    weights_DP = rng.multinomial(num_prompts, share, num_draws) / num_prompts

    def drawn(parts: Sequence[Floats]) -> Floats:
        found = []
        for rates_SP in parts:
            means_DS = weights_DP @ rates_SP.T
            num = len(rates_SP)
            seeds = rng.integers(0, num, means_DS.shape)
            means_D = means_DS.mean(axis=1)
            of_seeds_D = np.take_along_axis(means_DS, seeds, axis=1).mean(axis=1)
            found.append(means_D + widening(num) * (of_seeds_D - means_D))
        return np.stack(found, axis=1)

    return Draws(
        (mean_of(mine_rates), mean_of(reference_rates)),
        (drawn(mine_rates), drawn(reference_rates)),
    )


def widening(num_seeds: int) -> float:
    """What the deviations of draws of so few seeds lack."""
    quantiles = stats.t.ppf(0.5 + LEVEL / 2, num_seeds - 1) / stats.norm.ppf(0.5 + LEVEL / 2)
    return float(quantiles * np.sqrt(num_seeds / (num_seeds - 1)))


def mean_of(parts: Sequence[Floats]) -> Floats:
    """The accuracy at each budget."""
    return np.array([rates_SP.mean() for rates_SP in parts])


def ratios(
    mine: Runs, reference: Runs, measure: str, draws: Draws, uses: float = 1.0
) -> dict[int, Ratio]:
    """How many times less compute `mine` takes to what the reference reaches at each budget."""
    costs, means = (mine.cost(measure, uses), reference.cost(measure, uses)), draws.means
    values = compare(costs, means)
    draws_DT = np.array([compare(costs, each) for each in zip(*draws.drawn, strict=True)])
    found = {}
    for place, budget in enumerate(reference.by_budget):
        of_target = draws_DT[:, place]
        ends = np.quantile(of_target, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2), method="inverted_cdf")
        low, high = (float(end) if end > 0 else None for end in ends)
        value = values[place] or None
        is_bound = bool(means[0][0] >= means[1][place])
        most = float(costs[1][place] / costs[0][0])
        found[budget] = Ratio(value, low, high, float((of_target > 0).mean()), is_bound, most)
    return found


def compare(costs: tuple[Floats, Floats], accuracy: tuple[Floats, Floats]) -> list[float]:
    """The ratio at each of the reference's budgets; 0 where the target is not reached."""
    mine, reference = accuracy
    return [
        float(costs[1][place] / reach(costs[0], mine, target))
        for place, target in enumerate(reference)
    ]


def update_cost(reference: Runs) -> float:
    """rho: the modelled cost of updating a rollout over that of generating it, in the reference's
    runs at their largest budget. Their updated share is that of `charged_mixed`, a quarter of
    `charged` being generation."""
    line = list(reference.by_budget.values())[-1][0]
    charged, mixed = line["flops"]["charged"], line["flops"]["charged_mixed"]
    share = (mixed - charged / 4.0) / (0.75 * charged)
    seconds = line["device_seconds"]
    return float(seconds["update"] / share / (seconds["decode"] + seconds["prefill"]))
