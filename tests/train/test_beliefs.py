"""The benchmark of beliefs about pass rates, against numbers by hand."""

import numpy as np
import polars as pl
import pytest

from tests.bench.beliefs import (
    Group,
    Kept,
    beliefs_of,
    brier,
    calibration,
    logistic,
    replay,
    steps_of,
)

PROMPTS = pl.DataFrame(
    {
        "prompt_id": list("abcd"),
        "prompt": ["1 + 1", "12 + 3", "123 + 4", "1234 + 5"],
        "source": "sums",
        "level": ["1", "2", "3", "4"],
    }
)
CORRECT, SIZE = np.array([4, 3, 1, 0]), np.array([4, 4, 4, 4])


def test_brier_score_and_calibration() -> None:
    """Three of four correct at a prediction of .5, and one of one at .9."""
    predicted, correct, size = np.array([0.5, 0.9]), np.array([3.0, 1.0]), np.array([4.0, 1.0])
    assert brier(predicted, correct, size) == pytest.approx((4 * 0.25 + 0.01) / 5)
    assert calibration(predicted, correct, size) == pytest.approx((1.0 + 0.1) / 5)


def test_a_belief_predicts_before_it_learns() -> None:
    beliefs = beliefs_of(PROMPTS, CORRECT, SIZE)
    steps = [[Group(0, 0, 8)], [Group(0, 0, 8)]]
    # a Beta of (1 + 4, 1 + 0), then of (.8 * 5 + .2, .8 * 1 + .2 + 8)
    assert replay(beliefs["drift"], steps)[0] == pytest.approx([5 / 6, 4.2 / 13.2])
    assert replay(beliefs["drift without profile"], steps)[0] == pytest.approx([1 / 2, 1 / 10])
    assert replay(beliefs["knapsack"], steps)[0] == pytest.approx([1 / 2, 0])
    kept = replay(beliefs["profile, kept"], steps)[0]
    assert kept[0] == kept[1] > 0.75
    for belief in beliefs.values():
        before, _ = replay(belief, steps)[0]
        assert isinstance(belief, Kept) or belief.predict(0) < before


def test_the_regression_fits_rates_by_features() -> None:
    x = np.column_stack([np.ones(400), np.repeat([-1.0, 1.0], 200)])
    rates = logistic(x, np.repeat([2.0, 6.0], 200), np.full(400, 8.0))
    assert rates == pytest.approx(np.repeat([0.25, 0.75], 200), abs=1e-3)


def test_groups_of_a_run() -> None:
    rows = [
        (0, 0, "a", "correct"),
        (0, 0, "a", "wrong"),
        (0, 1, "b", "error"),
        (1, 0, "b", "wrong"),
    ]
    table = pl.DataFrame(rows, ["step", "group", "prompt_id", "outcome"], orient="row")
    table = table.with_columns(replayed=False)
    table = pl.concat([table, table[:1].with_columns(replayed=True)])
    assert steps_of(table, {"a": 7, "b": 9}) == [[Group(7, 1, 2)], [Group(9, 0, 1)]]
