"""Monotone curves: weights by hand, and the bias of first touch."""

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import CURVE
from tasks.report.curves import Monotone, comparable, fit_curve, monotone
from tasks.report.views.tables import ratio_words


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def points(accuracy: np.ndarray, half: float = 0.05) -> pl.DataFrame:
    """Return a validation curve whose points are 1 FLOP apart."""
    return CURVE.frame(
        {
            **CURVE.example,
            "step": step,
            "flops_charged": float(step),
            "accuracy": value,
            "accuracy_low": value - half,
            "accuracy_high": value + half,
            "branch": None,
        }
        for step, value in enumerate(accuracy.tolist())
    )


def test_points_at_the_same_compute_are_one_point_with_their_weight() -> None:
    """Step 0 of two seeds, 0.4 and 0.6, has twice the weight of the next point."""
    (curve,) = monotone(np.array([1.0, 0.0, 0.0]), np.array([[0.2, 0.4, 0.6]]))
    assert curve.flops.tolist() == [0, 1]
    assert curve.accuracy == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize(
    ("target", "expected"),
    [(0.3, 0.0), (0.45, 1.0), (0.5, 2.0), (0.55, 5.0), (0.61, np.inf)],
)
def test_the_compute_to_an_accuracy(target: float, expected: float) -> None:
    curve = Monotone(np.array([0.0, 2.0, 4.0, 6.0]), np.array([0.4, 0.5, 0.5, 0.6]))
    assert curve.reaches(target) == pytest.approx(expected)


def test_first_touch_of_a_noisy_curve_is_too_early_unlike_the_fit() -> None:
    """Accuracy rises from 0.4 to 0.6 in 40 steps, so 0.55 takes 30; validation is off by 0.03. The
    interval contains the truth in most cases."""
    truth = np.linspace(0.4, 0.6, 41)
    touched, fitted, num_covered = [], [], 0
    for seed in range(60):
        draws = np.random.default_rng(seed)
        seen = truth + draws.normal(0, 0.03, len(truth))
        touched.append(np.argmax(seen >= 0.55))
        needed = fit_curve([points(seen, 1.96 * 0.03)], "charged", 100, draws).compute_to(0.55)
        fitted.append(needed["flops"])
        num_covered += (needed["low"] or 41) <= 30 <= (needed["high"] or 41)
    assert np.mean(touched) < 27
    assert np.mean(fitted) == pytest.approx(30, abs=1)
    assert num_covered >= 54


def test_an_accuracy_that_is_not_reached_has_no_compute() -> None:
    needed = fit_curve([points(np.linspace(0.4, 0.5, 11))], "charged", 200, rng()).compute_to(0.6)
    assert needed["flops"] is None
    assert ratio_words({"times": None, "low": None, "high": 1.2}) == "–"
    assert ratio_words({"times": 1.5, "low": None, "high": 2.04}) == "1.5 (– to 2.0)"


def test_seeds_that_disagree_widen_the_band() -> None:
    low, high = points(np.linspace(0.4, 0.6, 11), 0.02), points(np.linspace(0.5, 0.7, 11), 0.02)
    widths = []
    for seeds in ([low, low], [low, high]):
        ends = fit_curve(seeds, "charged", 300, rng()).band()
        widths.append(float(np.mean(ends[1] - ends[0])))
    assert widths[0] < 0.03
    assert widths[1] == pytest.approx(0.1, abs=0.02), "a draw is either seed twice, or both"


def test_only_decayed_points_of_a_run_with_branches_are_compared() -> None:
    curve = points(np.array([0.4, 0.5, 0.55, 0.6, 0.58, 0.7]))
    assert comparable(curve).equals(curve)
    branches = pl.Series([None, None, 0.5, None, 0.75, None], dtype=pl.Float64)
    decayed = comparable(curve.with_columns(branch=branches))
    assert decayed["step"].to_list() == [0, 2, 4, 5]
    assert comparable(curve.head(0)).is_empty()
