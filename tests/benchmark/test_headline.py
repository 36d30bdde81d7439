"""The headline against numbers that are known: who is cheaper, by how much, and when nobody can
say."""

from types import SimpleNamespace

import numpy as np
import pytest

from tasks.benchmark import headline
from tasks.benchmark.headline import Runs, cost_of, reach, resample, runs_of, update_cost
from tasks.benchmark.results import digits
from tasks.common.files import ArtifactError

NUM_PROMPTS = 400


def line(recipe: str, budget: int, seed: int, rate: float, cost: float, profile: float = 0.0):
    """A test run of a policy that solves every prompt with the same chance."""
    rng = np.random.default_rng([budget, seed, len(recipe)])
    accounts = ("executed", "charged", "charged_mixed", "charged_paper")
    return {
        "correct": digits(rng.binomial(8, rate, NUM_PROMPTS).tolist()),
        "trials": digits([8] * NUM_PROMPTS),
        "rollouts": float(budget),
        "rollouts_profile": profile,
        "flops": dict.fromkeys(accounts, cost),
        "flops_profile": dict.fromkeys(accounts, profile),
        "device_seconds": {"decode": cost / 2, "update": cost / 2},
        "device_seconds_profile": {"decode": profile},
        "cpu_seconds": cost,
    }


def runs(recipe: str, points: list[tuple[int, float, float]], profile: float = 0.0) -> Runs:
    return Runs(
        recipe,
        {
            budget: [line(recipe, budget, seed, rate, cost, profile) for seed in range(5)]
            for budget, rate, cost in points
        },
    )


def test_the_interval_of_a_difference_of_five_seeds_covers_what_it_says() -> None:
    """Seeds that differ, prompts that do not: of 95 % intervals about as many hold the truth."""
    rng, held, num = np.random.default_rng(0), 0, 300
    for _ in range(num):
        parts = [
            Runs(
                "r",
                {
                    100: [
                        {"correct": digits([round(20 + 3 * z)] * 2), "trials": digits([35] * 2)}
                        for z in rng.standard_normal(5)
                    ]
                },
            )
            for _ in range(2)
        ]
        mine, reference = resample(*parts, 200).drawn
        low, high = np.quantile(mine - reference, (0.025, 0.975))
        held += low <= 0 <= high
    assert 0.92 < held / num < 0.995


def test_lines_of_several_settings_are_nobodys_seeds() -> None:
    protocol = SimpleNamespace(contestants=[SimpleNamespace(recipe="grpo")], seeds=[0, 1])
    base = {"family": "f", "recipe": "grpo", "measures": "test", "budget": 100}
    lines = [{**base, "seed": seed, "settings": {}} for seed in (0, 1)]
    assert list(runs_of(protocol, "f", lines)["grpo"].by_budget) == [100]
    assert runs_of(protocol, "f", lines[:1]) == {}  # a seed is missing
    with pytest.raises(ArtifactError, match="f grpo at 100 has 2 test lines of 2 settings"):
        runs_of(protocol, "f", [lines[0], {**lines[1], "settings": {"a": 1}}])


def ratios(mine: Runs, reference: Runs, measure: str, num_draws: int):
    return headline.ratios(mine, reference, measure, resample(mine, reference, num_draws))


REFERENCE = runs("grpo", [(100, 0.5, 10.0), (200, 0.6, 20.0), (400, 0.7, 40.0)])


@pytest.mark.parametrize(
    ("target", "compute"),
    [(0.5, 10.0), (0.6, 20.0), (0.55, 200**0.5), (0.2, 10.0), (0.71, np.inf)],
)
def test_a_frontier_is_read_on_a_logarithmic_axis(target: float, compute: float) -> None:
    cost, accuracy = np.array([10.0, 20.0, 40.0]), np.array([0.5, 0.6, 0.7])
    assert reach(cost, accuracy, target) == pytest.approx(compute)
    # a point that is worse than a cheaper one does not count
    assert reach(cost, np.array([0.5, 0.6, 0.55]), 0.6) == pytest.approx(20.0)


def test_the_reference_is_as_good_as_itself() -> None:
    found = ratios(REFERENCE, REFERENCE, "charged", 200)
    for budget in (100, 200, 400):
        assert found[budget].value == pytest.approx(1.0)
    # its own seeds are drawn twice, so the interval holds 1 and has a width
    assert found[200].low < 1.0 < found[200].high


def test_half_the_compute_is_a_ratio_of_two() -> None:
    cheap = runs("cheap", [(100, 0.5, 5.0), (200, 0.6, 10.0), (400, 0.7, 20.0)])
    found = ratios(cheap, REFERENCE, "executed", 300)
    assert found[200].value == pytest.approx(2.0, rel=0.1)
    assert found[200].low < 2.0 < found[200].high
    assert found[200].low > 1.5
    assert found[200].reached == 1.0
    assert not found[200].is_bound


def test_what_is_not_reached_stays_so() -> None:
    weak = runs("weak", [(100, 0.4, 1.0), (200, 0.45, 2.0), (400, 0.55, 4.0)])
    found = ratios(weak, REFERENCE, "charged", 100)
    assert found[400].value is None
    assert found[400].reached == 0.0
    assert (found[400].low, found[400].high) == (None, None)
    assert found[100].value > 2


def test_a_target_below_the_first_point_is_a_bound() -> None:
    strong = runs("strong", [(400, 0.7, 8.0)])
    found = ratios(strong, REFERENCE, "charged", 100)
    assert found[100].is_bound
    assert found[100].value == pytest.approx(10.0 / 8.0)


def test_profiling_is_charged_in_full_or_by_its_uses() -> None:
    reader = line("reader", 100, 0, 0.5, 10.0, profile=6.0)
    assert cost_of(reader, "charged") == 16.0
    assert cost_of(reader, "charged", uses=3) == 12.0
    assert cost_of(reader, "rollouts") == 106.0
    assert cost_of(reader, "device_seconds") == 16.0


def test_seconds_are_also_shown_for_other_costs_of_an_update() -> None:
    reader = line("reader", 100, 0, 0.5, 10.0, profile=6.0)
    assert cost_of(reader, "device_seconds, updates half") == 5.0 + 2.5 + 6.0
    assert cost_of(reader, "device_seconds, updates double", uses=2) == 5.0 + 10.0 + 3.0


def test_the_modelled_cost_of_an_update_is_that_of_a_rollout_that_is_updated() -> None:
    found = line("grpo", 100, 0, 0.5, 8.0)
    found["flops"] = {"charged": 8.0, "charged_mixed": 5.0}  # 2 to generate, half of 6 to update
    found["device_seconds"] = {"decode": 9.0, "prefill": 1.0, "update": 10.0, "score": 0.0}
    assert update_cost(Runs("grpo", {100: [found]})) == pytest.approx(2.0)
