"""Which recipe pays off: the ratio of the reference's compute to the least compute at which a
recipe's tuned frontier reaches the same accuracy, with an interval.

A recipe's frontier on a family in an account is the monotone curve through (compute, test accuracy)
of the settings chosen for this account, each as the mean over the seeds. The targets are the
accuracies of the reference at its own budgets, except the largest. At the largest, an equally good
recipe reaches the target only by chance, and its ratio is then above 1.

The interval is that of `interval`: it includes the noise of prompts, which all recipes share, and
that of the seeds of the points which are compared. For every recipe, it includes a deviation due to
its search, with the variance between repeated searches, pooled over the family's recipes. This last
part is omitted if no recipe was searched more than once.

Profiling is charged to the recipes that read the profile: in full, or 1 / `uses` of it if it is
amortised over `uses` runs. Above a ratio of 1 the recipe is cheaper. A target that a frontier does
not reach is reported as such. A target below the recipe's first point counts at that
point's compute, so the ratio is a lower bound. One below the reference's first is raised to it.

Legend: S seeds, P test prompts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flows.benchmark.frontier import MEASURES, Floats, best_by_budget, cost_of, selected_trials
from flows.benchmark.interval import Spread, compute_interval, frontier_of, spread_between
from flows.benchmark.protocol import Protocol, settings_of
from flows.benchmark.results import Line, counts_of
from tasks.common.statistics import Noise, noise_of


@dataclass(frozen=True)
class Ratio:
    """Compute of the reference / compute of the recipe, to the same accuracy, with its 95 %
    interval. `value` and `low` are None where the target is not reached, `high` if it is above
    `most`, the largest ratio that the points can show. If the target is below the frontier's first
    point (`is_bound`), the true ratio is larger."""

    value: float | None
    low: float | None
    high: float | None
    is_bound: bool
    most: float


@dataclass(frozen=True)
class Point:
    """Settings that were run on test at a budget, with one line per seed."""

    budget: int
    lines: Sequence[Line]

    @property
    def tests(self) -> list[float]:
        return [line["test"] for line in self.lines]

    def cost(self, measure: str, uses: float = 1.0) -> float:
        """Return the mean cost of the point's runs, with 1 / `uses` of the profile's cost."""
        return float(np.mean([cost_of(line, measure, uses) for line in self.lines]))

    def answers(self) -> tuple[str, ...]:
        """Return what identifies the point's runs: two recipes can have the same training."""
        return tuple(line[key] for line in self.lines for key in ("correct", "trials"))

    def rates(self) -> Floats:
        """Return the pass rate [S, P] of every test prompt in the run of every seed. For a prompt
        without a graded sample it is the run's mean, so that the mean is that of graded prompts."""
        correct_SP = np.array([counts_of(line["correct"]) for line in self.lines])
        trials_SP = np.array([counts_of(line["trials"]) for line in self.lines])
        rates_SP = correct_SP / np.maximum(trials_SP, 1)
        graded_S = np.maximum((trials_SP > 0).sum(axis=1), 1)
        return np.where(trials_SP > 0, rates_SP, (rates_SP.sum(axis=1) / graded_S)[:, None])


@dataclass(frozen=True)
class Runs:
    """A recipe on a family. `frontier` maps an account to the indices of its points in `points`;
    `best` maps a budget to the index of the settings with the best validation accuracy; `searches`
    has such a map for each complete search. `is_equal` is true if some account uses the settings
    chosen at equal rollouts, because its own settings have not been run."""

    name: str
    points: Sequence[Point]
    frontier: Mapping[str, Sequence[int]]
    best: Mapping[int, int]
    searches: Sequence[Mapping[int, int]]
    is_equal: bool

    def is_all_of(self, other: "Runs") -> bool:
        """Return whether the other's best settings at every budget are among these runs."""
        mine = {id(line) for point in self.points for line in point.lines}
        best = [other.points[place].lines[0] for place in other.best.values()]
        return all(id(line) in mine for line in best)

    def reads_profile(self) -> bool:
        """Return whether the recipe is charged for profiling."""
        return any(line["rollouts_profile"] for point in self.points for line in point.lines)


def make_runs(name: str, lines: Collection[Line], num_seeds: int) -> Runs | None:
    """Return the runs in `lines` (trials and tests of one recipe, or of several that train the same
    policy). Return None unless some budget's best settings were run on test with every seed."""
    by_settings: dict[str, list[Line]] = {}
    good = [line for line in lines if "failed" not in line]
    for line in good:
        if line["measures"] == "test":
            by_settings.setdefault(settings_of(line), []).append(line)
    whole = {what: tests for what, tests in by_settings.items() if len(tests) == num_seeds}
    whole = dict(sorted(whole.items(), key=lambda item: item[1][0]["budget"]))
    place = {what: number for number, what in enumerate(whole)}
    trials = [line for line in good if line["measures"] == "validation"]

    def places(selected: Collection[Line]) -> list[int]:
        return [place[what] for what in dict.fromkeys(map(settings_of, selected)) if what in place]

    def best_of(tried: Collection[Line]) -> dict[int, int]:
        return {
            budget: place[settings_of(trial)]
            for budget, trial in best_by_budget(tried).items()
            if settings_of(trial) in place
        }

    best = best_of(trials)
    if not best:
        return None
    frontier, is_equal = {}, False
    for measure in MEASURES:
        selected = selected_trials(trials, measure)
        is_run = len(places(selected)) == len({settings_of(trial) for trial in selected})
        frontier[measure] = places(selected) if is_run else list(best.values())
        is_equal = is_equal or not is_run
    by_search = [
        best_of([trial for trial in trials if trial["seed"] == seed])
        for seed in sorted({trial["seed"] for trial in trials})
    ]
    searches = [search for search in by_search if search.keys() == best.keys()]
    points = [Point(tests[0]["budget"], tests) for tests in whole.values()]
    return Runs(name, points, frontier, best, searches, is_equal)


def all_runs(protocol: Protocol, family: str, lines: Collection[Line]) -> dict[str, Runs]:
    """Return the runs of the protocol's recipes, by recipe; omit those without results on test."""
    found = {}
    for contestant in protocol.contestants:
        runs = runs_of(protocol, family, [contestant.recipe], lines)
        if runs is not None:
            found[contestant.recipe] = runs
    return found


def runs_of(
    protocol: Protocol, family: str, recipes: Collection[str], lines: Collection[Line]
) -> Runs | None:
    """Return the runs of these recipes on a family, as those of one recipe (see `make_runs`)."""
    mine = [line for line in lines if line["family"] == family and line["recipe"] in recipes]
    return make_runs(" or ".join(f"`{recipe}`" for recipe in recipes), mine, len(protocol.seeds))


def target_budgets(reference: Runs, others: Collection[Runs]) -> list[int]:
    """Return the budgets of the reference at which its accuracy is a target. The largest is one of
    them only if it is the only budget, or if all other recipes were run beyond it."""
    *smaller, largest = reference.best
    is_passed = all(max(runs.best) > largest for runs in others)
    return [*smaller, largest] if is_passed or not smaller else smaller


def noise_between(*recipes: Runs) -> tuple[Noise, list[list[int]]]:
    """Return the noise of the recipes' points, and for each recipe the indices of its points there.
    Points with the same runs are one."""
    points = {point.answers(): point for runs in recipes for point in runs.points}
    number = {answers: place for place, answers in enumerate(points)}
    noise = noise_of([point.rates() for point in points.values()])
    return noise, [[number[point.answers()] for point in runs.points] for runs in recipes]


def spread_of(recipes: Collection[Runs]) -> Spread | None:
    """Return the spread between searches, pooled over recipes and budgets, because one recipe has
    too few searches. Recipes with the same runs count once. Return None if no recipe has two
    searches."""
    squares, freedom = 0.0, 0
    for runs in {tuple(p.answers() for p in runs.points): runs for runs in recipes}.values():
        if len(runs.searches) < 2:
            continue
        noise, (number,) = noise_between(runs)
        searches = [[number[place] for place in search.values()] for search in runs.searches]
        squares += spread_between(noise, searches) * (len(searches) - 1)
        freedom += len(searches) - 1
    return Spread(float(np.sqrt(max(squares / freedom, 0.0))), freedom) if freedom else None


def ratios(
    mine: Runs, reference: Runs, measures: Sequence[str], spread: Spread | None, uses: float = 1.0
) -> dict[str, dict[int, Ratio]]:
    """Return, by measure and budget of the reference, the reference's compute / that of `mine`, to
    the reference's accuracy there."""
    noise, numbers = noise_between(mine, reference)
    by_measure: dict[str, dict[int, Ratio]] = {measure: {} for measure in measures}
    for measure in measures:
        own, its = (
            frontier_of(
                [(runs.points[p].cost(measure, uses), number[p]) for p in runs.frontier[measure]],
                noise,
            )
            for runs, number in zip((mine, reference), numbers, strict=True)
        )
        for budget, place in reference.best.items():
            target = max(float(noise.means[numbers[1][place]]), float(its.accuracies[0]))
            compute = its.reach(target)
            least, largest = compute_interval(own, its, target, noise, spread)
            most = compute / float(np.exp(own.log_costs[0]))
            by_measure[measure][budget] = Ratio(
                compute / own.reach(target) or None,
                compute / largest or None,
                compute / least if least > 0 else None,
                bool(own.accuracies[0] >= target),
                most,
            )
    return by_measure


def update_cost(reference: Runs) -> float | None:
    """Return rho, the modelled cost of training on a rollout relative to generating it, in the
    reference's first run at its largest budget; None if it trained on none. `charged_mixed` gives
    the share of rollouts that are trained on; generation is a quarter of `charged`."""
    line = reference.points[reference.best[max(reference.best)]].lines[0]
    charged, mixed = line["flops"]["charged"], line["flops"]["charged_mixed"]
    share = (mixed - charged / 4.0) / (0.75 * charged)
    seconds = line["device_seconds"]
    generated = seconds["decode"] + seconds["prefill"]
    return float(seconds["update"] / share / generated) if share > 1e-9 else None
