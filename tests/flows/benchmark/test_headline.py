"""The headline against known numbers: the cheaper recipe, the ratio, and cases without a
conclusion."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flows.benchmark import headline
from flows.benchmark.frontier import cost_of, selected_trials
from flows.benchmark.headline import (
    Ratio,
    Runs,
    make_runs,
    noise_between,
    spread_of,
    target_budgets,
    update_cost,
)
from flows.benchmark.interval import Frontier, Spread, compute_interval, frontier_of
from flows.benchmark.results import digits
from flows.benchmark.tables import ratio_words
from tasks.common.statistics import Noise

NUM_PROMPTS = 400
ACCOUNTS = ("executed", "charged", "charged_mixed", "charged_paper")


def line(
    recipe: str, budget: int, seed: int, rate: float, cost: float, profile: float = 0.0
) -> dict[str, Any]:
    """Return a test run of a policy that solves every prompt with the same probability."""
    rng = np.random.default_rng([budget, seed, len(recipe)])
    correct = rng.binomial(8, rate, NUM_PROMPTS)
    return {
        "family": "f",
        "recipe": recipe,
        "budget": budget,
        "seed": seed,
        "measures": "test",
        "settings": {},
        "test": float(correct.mean() / 8),
        "correct": digits(correct.tolist()),
        "trials": digits([8] * NUM_PROMPTS),
        "rollouts": float(budget),
        "rollouts_profile": profile,
        "flops": dict.fromkeys(ACCOUNTS, cost),
        "flops_profile": dict.fromkeys(ACCOUNTS, profile),
        "device_seconds": {"decode": cost / 2, "update": cost / 2},
        "device_seconds_profile": {"decode": profile},
    }


def trial(tested: dict[str, Any], validation: float, seed: int = 1000) -> dict[str, Any]:
    return {**tested, "measures": "validation", "seed": seed, "validation": validation}


def made(recipe: str, lines: list[dict[str, Any]], num_seeds: int = 5) -> Runs:
    found = make_runs(f"`{recipe}`", lines, num_seeds)
    assert found is not None
    return found


def runs(recipe: str, points: list[tuple[int, float, float]], profile: float = 0.0) -> Runs:
    lines = [
        line(recipe, budget, seed, rate, cost, profile)
        for budget, rate, cost in points
        for seed in range(5)
    ]
    return made(recipe, lines + [trial(each, each["test"]) for each in lines[::5]])


def drawn_runs(
    rng: np.random.Generator, rates_P: Any, gains: dict[int, float], factor: float = 1.0
) -> Runs:
    """Return a recipe whose seeds differ by chance, with these gains of its budgets, and a cost of
    1 / `factor` for each rollout."""
    lines = []
    for budget, gain in gains.items():
        for seed in range(5):
            rate_P = np.clip(rates_P + gain + rng.normal(0, 0.008), 0, 1)
            found = line("grpo", budget, seed, 0.5, budget / factor)
            lines.append({**found, "correct": digits(rng.binomial(8, rate_P).tolist())})
    return made("grpo", lines + [trial(each, gains[each["budget"]]) for each in lines[::5]])


def test_a_recipe_equal_to_the_reference_has_a_ratio_of_about_one() -> None:
    """At the largest budget its ratios are above 1 or not reached, by chance; at the targets they
    are about 1, with the nominal coverage."""
    rng, num = np.random.default_rng(0), 60
    gains = {4096: 0.0, 8192: 0.025, 16384: 0.05}
    values: dict[int, list[float]] = {budget: [] for budget in gains}
    num_covered = 0
    for _ in range(num):
        rates_P = rng.beta(0.6, 0.6, NUM_PROMPTS)
        mine, reference = (drawn_runs(rng, rates_P, gains) for _ in range(2))
        found = ratios(mine, reference, "rollouts")
        for budget, ratio in found.items():
            values[budget].append(ratio.value or 0.0)
        at = found[target_budgets(reference, [mine])[-1]]
        num_covered += (at.low or 0.0) <= 1.0 <= (at.high or np.inf)
    largest = np.array(values[16384])
    assert np.median(largest[largest > 0]) > 1.05
    assert 0.3 < (largest == 0).mean() < 0.7
    assert target_budgets(reference, [mine])[-1] == 8192
    assert np.median(values[8192]) == pytest.approx(1.0, abs=0.04)
    assert num_covered / num >= 0.93


def test_the_largest_budget_is_a_target_if_single_or_exceeded() -> None:
    reference = runs("grpo", [(100, 0.5, 1.0), (200, 0.6, 2.0)])
    beyond = runs("far", [(100, 0.5, 1.0), (400, 0.6, 2.0)])
    assert target_budgets(reference, [beyond]) == [100, 200]
    assert target_budgets(reference, [beyond, reference]) == [100]
    single = runs("grpo", [(100, 0.5, 1.0)])
    assert target_budgets(single, [single]) == [100]


def test_half_the_compute_is_significant_in_most_cases() -> None:
    """The noise of answers counts once, and the seeds of the compared points share one quantile."""
    rng, num, gains = np.random.default_rng(0), 40, {4096: 0.0, 8192: 0.025, 16384: 0.05}
    num_covered = num_apart = 0
    for _ in range(num):
        rates_P = rng.beta(0.6, 0.6, NUM_PROMPTS)
        mine, reference = (drawn_runs(rng, rates_P, gains, factor) for factor in (1.999, 1.0))
        found = ratios(mine, reference, "executed")[8192]
        num_covered += (found.low or 0.0) <= 1.999 <= (found.high or np.inf)
        num_apart += (found.low or 0.0) > 1.0
    assert num_covered / num >= 0.9
    assert num_apart / num >= 0.7


def is_apart(mine: Runs, reference: Runs, spread: Spread | None = None) -> bool:
    """Return whether two recipes of one point differ significantly: an end is not open."""
    noise, numbers = noise_between(mine, reference)
    both = [
        frontier_of([(1.0, places[runs.best[100]])], noise)
        for runs, places in zip((mine, reference), numbers, strict=True)
    ]
    return compute_interval(*both, both[1].accuracies[0], noise, spread) != (0.0, np.inf)


def test_the_coverage_of_the_interval_of_a_difference_of_five_seeds() -> None:
    """Seeds differ and prompts do not; about 95 % of the intervals contain the truth."""
    rng, num_covered, num = np.random.default_rng(0), 0, 300
    for _ in range(num):
        parts = []
        for _ in range(2):
            lines = [
                {
                    **line("r", 100, seed, 0.5, 1.0),
                    "correct": digits([round(20 + 3 * z)] * 2),
                    "trials": digits([35] * 2),
                }
                for seed, z in enumerate(rng.standard_normal(5))
            ]
            parts.append(made("r", [*lines, trial(lines[0], 0.5)]))
        num_covered += not is_apart(*parts)
    assert 0.92 < num_covered / num < 0.98


def test_lines_of_several_settings_are_separate_points() -> None:
    base = line("grpo", 100, 0, 0.5, 1.0)
    lines = [{**base, "seed": seed} for seed in (0, 1)]
    found = made("grpo", [*lines, trial(base, 0.5)], 2)
    assert [len(point.lines) for point in found.points] == [2]
    assert make_runs("grpo", [lines[0], trial(base, 0.5)], 2) is None  # a seed is missing
    other = {"settings": {"a": 1}}
    mixed = [lines[0], {**lines[1], **other}, trial(base, 0.5)]
    assert make_runs("grpo", mixed, 2) is None
    both = [*lines, *({**each, **other} for each in lines)]
    tried = [trial(base, 0.5), trial({**base, **other}, 0.6)]
    found = made("grpo", both + tried, 2)
    assert [point.lines[0]["settings"] for point in found.points] == [{}, {"a": 1}]
    assert found.best == {100: 1}


def search_runs(recipe: str, first: float, second: float, num: int = 5) -> Runs:
    """Return two searches that chose different settings, whose tests differ."""
    lines, tried = [], []
    for search, (name, rate) in enumerate((("a", first), ("b", second))):
        of = [line(recipe, 100, seed, rate, 10.0) for seed in range(num)]
        lines += [{**each, "settings": {"name": name}} for each in of]
        tried.append(trial(lines[-1], rate, 1000 + search))
    return made(recipe, lines + tried, num)


def test_the_better_search_and_the_better_recipe_are_chosen() -> None:
    found = search_runs("grpo", 0.5, 0.6)
    assert found.points[found.best[100]].lines[0]["settings"] == {"name": "b"}
    assert [set(search) for search in found.searches] == [{100}, {100}]
    one, other = search_runs("grpo", 0.5, 0.6), search_runs("grpo_mixed", 0.55, 0.7)
    lines = [each for runs in (one, other) for point in runs.points for each in point.lines]
    tried = [
        trial(point.lines[0], rate)
        for runs, rates in ((one, (0.5, 0.6)), (other, (0.55, 0.7)))
        for point, rate in zip(runs.points, rates, strict=True)
    ]
    merged = made("grpo", lines + tried)
    assert merged.points[merged.best[100]].lines[0]["recipe"] == "grpo_mixed"
    assert other.is_all_of(merged)
    assert not one.is_all_of(merged)


def test_the_spread_of_searches_is_in_every_interval() -> None:
    differing = [search_runs(name, 0.5, 0.56) for name in ("one", "three", "eleven")]
    spread = spread_of(differing)
    assert spread is not None
    assert spread.freedom == 3
    assert spread.deviation == pytest.approx(0.06 / 2**0.5, abs=0.012)
    # including that of a recipe whose own searches agree
    agreeing = search_runs("agreeing", 0.6, 0.6)
    assert is_apart(agreeing, differing[0])
    assert not is_apart(agreeing, differing[0], spread)
    # a recipe with the same runs adds nothing, and noise is no difference between searches
    assert spread_of([*differing, differing[0]]) == spread
    same = [search_runs(name, 0.5, 0.5) for name in ("one", "three", "eleven")]
    assert getattr(spread_of(same), "deviation", 1.0) < 0.002
    assert spread_of([runs("one", [(100, 0.5, 1.0)])]) is None


def test_recipes_that_differ_only_by_their_searches_are_equal() -> None:
    """Searches find settings of different quality. Intervals with their spread contain a difference
    of 0 with the nominal coverage; those without it do not."""
    rng, num, num_covered = np.random.default_rng(1), 100, {False: 0, True: 0}

    def searched(recipe: str) -> Runs:
        lines, tried = [], []
        for search in range(2):
            rate = 0.5 + rng.normal(0.0, 0.04)
            for seed in range(5):
                counts = rng.binomial(35, rate, 40)
                found = {**line(recipe, 100, seed, 0.5, 1.0), "settings": {"search": search}}
                found |= {"correct": digits(counts.tolist()), "trials": digits([35] * 40)}
                lines.append({**found, "test": float(counts.mean() / 35)})
            tried.append(trial(lines[-1], rate, search))
        return made(recipe, lines + tried)

    for _ in range(num):
        family = [searched(name) for name in "abcd"]
        for has_spread in (False, True):
            spread = spread_of(family) if has_spread else None
            num_covered[has_spread] += not is_apart(*family[:2], spread)
    assert num_covered[True] / num > 0.93
    assert num_covered[False] / num < 0.8


def test_each_account_chooses_settings_on_its_own_frontier() -> None:
    def tried(name: str, budget: int, validation: float, charged: float) -> dict[str, Any]:
        found = trial(line("grpo", budget, 0, 0.5, charged), validation)
        found["flops"] = {**found["flops"], "executed": 100.0 * budget}
        return {**found, "settings": {"name": name}}

    trials = [
        tried("best small", 100, 0.60, 40.0),
        tried("half the cost", 100, 0.59, 20.0),
        tried("bad and dear", 100, 0.40, 30.0),
        tried("below the line", 100, 0.592, 35.0),
        tried("best large", 200, 0.70, 80.0),
    ]

    def names(measure: str) -> set[str]:
        return {found["settings"]["name"] for found in selected_trials(trials, measure)}

    assert names("rollouts") == {"best small", "best large"}
    assert names("charged") == {"best small", "best large", "half the cost"}
    # settings with equal costs in an account are chosen by accuracy
    assert names("executed") == {"best small", "best large"}
    # its frontier has them after their tests; before, every account has the first two
    tests = {
        name: [
            {**each, "measures": "test", "seed": seed, "test": each["validation"]}
            for each in trials
            if each["settings"]["name"] == name
            for seed in range(5)
        ]
        for name in ("best small", "best large", "half the cost")
    }
    half = made("grpo", trials + tests["best small"] + tests["best large"])
    assert half.is_equal
    assert half.frontier["charged"] == half.frontier["rollouts"]
    whole = made("grpo", [*trials, *itertools.chain(*tests.values())])
    assert not whole.is_equal
    assert len(whole.frontier["charged"]) == 3
    assert len(whole.frontier["rollouts"]) == 2


def ratios(mine: Runs, reference: Runs, measure: str) -> dict[int, headline.Ratio]:
    return headline.ratios(mine, reference, [measure], None)[measure]


REFERENCE = runs("grpo", [(100, 0.5, 10.0), (200, 0.6, 20.0), (400, 0.7, 40.0)])


@pytest.mark.parametrize(
    ("target", "compute"),
    [(0.5, 10.0), (0.6, 20.0), (0.55, 200**0.5), (0.2, 10.0), (0.71, np.inf)],
)
def test_a_frontier_is_read_on_a_logarithmic_axis(target: float, compute: float) -> None:
    def read(costs: list[float], accuracies: list[float]) -> Frontier:
        one = np.ones(len(costs))
        noise = Noise(np.array(accuracies), one, np.diag(one), one, 2, 2)
        return frontier_of(zip(costs, range(len(costs)), strict=True), noise)

    assert read([10.0, 20.0, 40.0], [0.5, 0.6, 0.7]).reach(target) == pytest.approx(compute)
    # in any order of the points
    assert read([40.0, 20.0, 10.0], [0.7, 0.6, 0.5]).reach(target) == pytest.approx(compute)
    # a point that is worse than a cheaper one does not count
    assert read([10.0, 20.0, 40.0], [0.5, 0.6, 0.55]).reach(0.6) == pytest.approx(20.0)
    assert read([10.0], [0.5]).reach(0.5) == pytest.approx(10.0)


def test_the_interval_by_hand() -> None:
    """Halfway between 0.5 and 0.6 lies the target, 0.55. All three have the variance v of 1e6
    seeds. At the share 1/4 the variance is (9/16 + 1/16 + 1) v, and the difference, 0.025, is 1.96
    of its deviations for this v."""
    variance = 0.025**2 / (1.625 * 1.959964**2)
    noise = Noise(
        np.array([0.5, 0.6, 0.55]), np.full(3, variance), np.zeros((3, 3)), np.zeros(3), 10**6, 2
    )
    mine, other = frontier_of([(1.0, 0), (16.0, 1)], noise), frontier_of([(3.0, 2)], noise)
    assert compute_interval(mine, other, 0.55, noise) == pytest.approx((2.0, 8.0), rel=1e-3)
    # neither end of the frontier differs from the target
    wide = Noise(noise.means, 16 * noise.seeds, noise.prompts, noise.answers, 10**6, 2)
    assert compute_interval(mine, other, 0.55, wide) == (0.0, np.inf)


def test_half_the_compute_is_a_ratio_of_two() -> None:
    cheap = runs("cheap", [(100, 0.5, 5.0), (200, 0.6, 10.0), (400, 0.7, 20.0)])
    found = ratios(cheap, REFERENCE, "executed")
    assert found[200].value == pytest.approx(2.0, rel=0.1)
    assert found[200].low < 2.0 < found[200].high
    assert found[200].low > 1.5
    assert not found[200].is_bound


def test_an_unreached_target_has_no_ratio() -> None:
    weak = runs("weak", [(100, 0.4, 1.0), (200, 0.45, 2.0), (400, 0.55, 4.0)])
    found = ratios(weak, REFERENCE, "charged")
    assert found[400].value is None
    # even the last point is significantly worse: the ratio is below its own
    assert (found[400].low, found[400].high) == (None, pytest.approx(40.0 / 4.0))
    assert found[100].value > 2


def test_a_single_worse_point_is_below_the_reference() -> None:
    found = ratios(runs("weak", [(200, 0.5, 25.0)]), REFERENCE, "charged")[200]
    assert ratio_words(found) == "**not reached** (not reached to 0.80)"
    equal = ratios(runs("weaker", [(200, 0.598, 25.0)]), REFERENCE, "charged")[200]
    assert ratio_words(replace(equal, value=None)) == "not reached (not reached to 0.80 or more)"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(1.64, 1.23, 2.19, False, 8.0), "**1.64** (1.23 to 2.19)"),
        (Ratio(0.66, 0.49, 0.93, False, 8.0), "**0.66** (0.49 to 0.93)"),
        (Ratio(0.92, None, 0.94, False, 8.0), "**0.92** (not reached to 0.94)"),
        (Ratio(1.21, 1.21, None, True, 8.0), "**at least 1.21** (1.21 or more)"),
        # 1 is in the interval as it is printed, or in its open end
        (Ratio(0.63, 0.43, 0.998, False, 8.0), "0.63 (0.43 to 1.00)"),
        (Ratio(1.10, 1.003, 1.20, False, 8.0), "1.10 (1.00 to 1.20)"),
        (Ratio(0.26, 0.22, None, False, 0.31), "0.26 (0.22 to 0.31 or more)"),
        (Ratio(0.25, 0.25, 0.25, True, 8.0), "at least 0.25 (0.25 or more)"),
    ],
)
def test_a_ratio_is_bold_if_its_interval_excludes_1(ratio: Ratio, words: str) -> None:
    assert ratio_words(ratio) == words


def test_a_target_below_the_first_point_is_a_bound() -> None:
    strong = runs("strong", [(400, 0.7, 8.0)])
    found = ratios(strong, REFERENCE, "charged")
    assert found[100].is_bound
    assert found[100].value == pytest.approx(10.0 / 8.0)


def test_a_target_below_the_references_first_point_is_raised_to_that_point() -> None:
    """Otherwise a recipe would be compared at an accuracy that costs the reference less."""
    reference = runs("grpo", [(100, 0.6, 10.0), (200, 0.5, 20.0)])
    found = ratios(runs("mine", [(100, 0.4, 2.0), (200, 0.65, 8.0)]), reference, "charged")
    assert found[200] == found[100]
    assert found[100].value == pytest.approx(10.0 / (2.0 * 4.0**0.8), rel=0.05)


def test_profiling_is_charged_in_full_or_by_its_uses() -> None:
    reader = line("reader", 100, 0, 0.5, 10.0, profile=6.0)
    assert cost_of(reader, "charged") == 16.0
    assert cost_of(reader, "charged", uses=3) == 12.0
    assert cost_of(reader, "rollouts") == 106.0
    assert cost_of(reader, "device_seconds") == 16.0
    # other costs of an update
    assert cost_of(reader, "device_seconds, updates half") == 5.0 + 2.5 + 6.0
    assert cost_of(reader, "device_seconds, updates double", uses=2) == 5.0 + 10.0 + 3.0


def test_the_modelled_cost_of_an_update_is_per_updated_rollout() -> None:
    found = line("grpo", 100, 0, 0.5, 8.0)
    found["flops"] = {"charged": 8.0, "charged_mixed": 5.0}  # 2 to generate, half of 6 to update
    found["device_seconds"] = {"decode": 9.0, "prefill": 1.0, "update": 10.0, "score": 0.0}
    point = headline.Point(100, [found])
    assert update_cost(Runs("grpo", [point], {}, {100: 0}, [], False)) == pytest.approx(2.0)
    found["flops"]["charged_mixed"] = 2.0  # no rollout has a gradient
    assert update_cost(Runs("grpo", [point], {}, {100: 0}, [], False)) is None


def test_a_prompt_without_a_graded_sample_does_not_count() -> None:
    lines = [{"correct": "40", "trials": trials} for trials in ("80", "88")]
    assert headline.Point(100, lines).rates().mean(axis=1).tolist() == [0.5, 0.25]
