"""Intervals, pass@k and the chance of a mixed group, against hand-computed and brute-force
values."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.statistics import (
    MANY,
    Noise,
    bootstrap_interval,
    crossed_interval,
    equal_interval,
    fit_beta,
    mixed_probability,
    noise_of,
    pass_at_k,
    times_for_a_point,
    variance_of,
    wilson_interval,
    with_power,
)


def test_wilson_interval_by_hand() -> None:
    low, high = wilson_interval([2, 0, 8], [8, 8, 8])
    np.testing.assert_allclose(low, [0.07149, 0.0, 0.67559], atol=1e-4)
    np.testing.assert_allclose(high, [0.59072, 0.32441, 1.0], atol=1e-4)
    assert all(np.isnan(bound).all() for bound in wilson_interval([0], [0]))


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(case: tuple[int, int, int]) -> None:
    correct, trials, k = case
    outcomes = [1] * correct + [0] * (trials - correct)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(correct, trials, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_and_of_too_few_trials() -> None:
    # 1000 of 2000 samples without one of the 500 correct ones are nearly impossible
    assert pass_at_k([500, 0], [2000, 2000], 1000) == pytest.approx([1.0, 0.0])
    assert math.isnan(pass_at_k(1, 2, 3))


def test_mixed_probability_by_quadrature() -> None:
    # posterior Beta(3, 7): the integral of (1 - p^4 - (1-p)^4) against its density
    grid = (np.arange(200_000) + 0.5) / 200_000
    density = grid**2 * (1 - grid) ** 6
    expected = ((1 - grid**4 - (1 - grid) ** 4) * density).sum() / density.sum()
    assert mixed_probability(2, 8, 4, (1.0, 1.0)) == pytest.approx(expected, abs=1e-6)
    assert mixed_probability(2, 8, 1, (1.0, 1.0)) == pytest.approx(0.0)


def test_forecast_of_mixed_groups_is_calibrated() -> None:
    """For prompts that were chosen because they look half-solved, the posterior predicts the number
    of mixed groups."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 1.5, 20_000)
    counts = rng.binomial(8, rates)
    prior = fit_beta(counts, np.full(20_000, 8))
    np.testing.assert_allclose(prior, (0.5, 1.5), rtol=0.05)
    for chosen in (counts == 0, counts == 4, counts == 7):
        truth = (1 - rates[chosen] ** 8 - (1 - rates[chosen]) ** 8).mean()
        forecast = mixed_probability(counts[chosen], np.full(chosen.sum(), 8), 8, prior).mean()
        assert forecast == pytest.approx(truth, abs=0.02)


def test_bootstrap_interval_covers() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_interval(rng.random(60), 200, rng)
        covered += low <= 0.5 <= high
    assert 175 <= covered <= 200


@pytest.mark.parametrize(("num_prompts", "most"), [(7, 100), (300, 300)])
def test_bootstrap_draws_few_values_at_once(
    num_prompts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, sizes = np.arange(num_prompts) / num_prompts, []
    draws = np.random.default_rng(5).integers(0, num_prompts, (150, num_prompts))
    rng = np.random.default_rng(5)

    def integers(low: int, high: int, shape: tuple[int, int]) -> Any:
        sizes.append(math.prod(shape))
        return rng.integers(low, high, shape)

    monkeypatch.setattr("tasks.common.statistics.DRAWN", 100)
    found = bootstrap_interval(values, 150, SimpleNamespace(integers=integers))
    assert found == tuple(np.quantile(values[draws].mean(1), [0.5 - 0.95 / 2, 0.5 + 0.95 / 2]))
    assert max(sizes) <= most
    assert sum(sizes) == draws.size


def test_interval_of_equal_values() -> None:
    """Up to 8.76 % of the prompts may differ, by half a point in either direction, or by more."""
    assert bootstrap_interval([0.5] * 40, 9, np.random.default_rng(0)) == pytest.approx(
        (0.4562, 0.5438), abs=1e-4
    )
    assert equal_interval(0.0, 40, (-1.0, 1.0)) == pytest.approx((-0.0876, 0.0876), abs=1e-4)
    assert equal_interval(1.0, 40, (-1.0, 1.0)) == pytest.approx((0.8247, 1.0), abs=1e-4)


@pytest.mark.parametrize("seed_spread", [0.0, 0.02])
def test_crossed_interval_covers(seed_spread: float) -> None:
    """If seeds differ, a bootstrap of three of them covers the truth only three times in four."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        seeds, prompts = rng.normal(0, seed_spread, (3, 1)), rng.normal(0, 0.01, (1, 64))
        low, high = crossed_interval(seeds + prompts + rng.normal(0, 0.01, (3, 64)), (-1.0, 1.0))
        covered += low <= 0.0 <= high
    assert 0.9 <= covered / 400 <= 0.99


def test_more_seeds_narrow_the_interval() -> None:
    rng, widths = np.random.default_rng(0), []
    for num_seeds in (3, 5, 10):
        noise = [rng.normal(0, 0.25, (num_seeds, 256)) for _ in range(40)]
        ends = np.array([crossed_interval(values, (-1.0, 1.0)) for values in noise])
        widths.append(float(np.median(ends[:, 1] - ends[:, 0])))
    assert widths[0] > 1.2 * widths[1] > 1.2 * 1.2 * widths[2]


def test_crossed_interval_of_seeds_with_equal_means() -> None:
    # prompts' means 1, 1/2, 1/2, 0: a variance of 1/6 over 4 prompts, t with 3 degrees of freedom
    half = 3.182446 * (1 / 24) ** 0.5
    expected = pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert crossed_interval([[1, 1, 0, 0], [1, 0, 1, 0]], (-1.0, 2.0)) == expected
    # the prompts' means are equal as well: only noise, a sum of squares of 2 over 3
    half = 3.182446 * (2 / 3 / 8) ** 0.5
    expected = pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert crossed_interval([[1, 1, 0, 0], [0, 0, 1, 1]], (-1.0, 2.0)) == expected
    # all values are equal
    assert crossed_interval(np.zeros((3, 40)), (-1.0, 1.0)) == equal_interval(0.0, 40, (-1.0, 1.0))


@pytest.mark.parametrize(
    ("num_seeds", "answers", "told", "times"),
    [
        # each recipe's seeds deviate by 0.02, their difference's mean by 0.02 (2 / S)^1/2: t is
        # 12.71 with two seeds, 4.303 with three, and 2.04 with the 33 that are needed of either
        (2, 0.0, 645.8, 16.59),
        (3, 0.0, 49.37, 11.06),
        # and 4 answers of a pass rate of 1/2 to 256 prompts: a variance of 2 / 16 / (256 S)
        (2, 1 / 2048 / 2, 1045.5, 17.14),
        (3, 1 / 2048 / 3, 79.76, 11.60),
    ],
)
def test_more_seeds_and_prompts_have_a_smaller_quantile(
    num_seeds: int, answers: float, told: float, times: float
) -> None:
    seeds, prompts = np.array([0.0008 / num_seeds + answers]), np.array([[answers]])
    noise = Noise(np.zeros(1), seeds, prompts, np.array([answers]), num_seeds, 256)
    (variance,), (freedom,) = variance_of(noise, np.ones((1, 1)))
    half = scipy.stats.t.ppf(0.975, freedom) * variance**0.5
    assert (half / 0.01) ** 2 == pytest.approx(told, rel=1e-3)
    assert times_for_a_point(noise) == pytest.approx(times, abs=0.01)


def test_the_difference_that_is_found_with_a_probability_of_80_percent() -> None:
    assert with_power(0.0195996) == pytest.approx(0.0280158, abs=1e-6)  # 1.96 and 2.80 deviations
    noise = noise_of(np.random.default_rng(0).normal(0, 1, (1, 2, 1)) * np.ones((1, 1, 99)))
    assert with_power(12.7062, noise) == pytest.approx(12.7062 + 1.37638, abs=1e-3)  # t(1)


def test_many_prompts_give_the_numbers_of_few() -> None:
    """They are those of fewer prompts with the same shares, and of each prompt separately."""
    rng = np.random.default_rng(0)
    trials = rng.integers(4, 9, 10_000)
    correct = rng.binomial(trials, rng.beta(0.5, 2.0, len(trials)))
    sizes = rng.choice([2, 4, 8], len(trials))
    many = [np.tile(values, 11) for values in (correct, trials, sizes)]
    assert len(many[0]) > MANY
    prior = fit_beta(correct, trials)
    assert fit_beta(many[0], many[1]) == pytest.approx(prior, rel=1e-4)
    assert prior == pytest.approx((0.5, 2.0), rel=0.1)
    found = mixed_probability(*many, prior)
    assert (found == np.tile(mixed_probability(correct, trials, sizes, prior), 11)).all()
