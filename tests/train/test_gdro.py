"""Weights of prompts by bins of pass rate (GDRO)."""

from typing import Any

import numpy as np
import pytest

from tasks.common.params import ParamsError
from tasks.train.methods.shape import (
    gdro,
)
from tests.train.steps import prompts_of, rollouts_of

RNG = np.random.default_rng(0)


def gdro_of(**settings: Any) -> gdro.Method:
    return gdro.Method(gdro.Settings(**settings), prompts_of(9))


def test_weights_of_bins_by_their_scores() -> None:
    """Published values; the cap holds after the mean."""
    scores = np.array([0.2, 0.5, 0.9])
    found = gdro.bin_weights(scores, 1.0, 2.0)
    assert found == pytest.approx([0.6875, 0.9280, 1.3845], abs=5e-5)
    law = 0.9 * found / found.sum() + 0.1 / 3
    assert law == pytest.approx([0.2396, 0.3117, 0.4487], abs=6e-5)
    assert gdro.bin_weights(scores, 1.0, 1.2)[2] == 1.2
    assert gdro.bin_weights(scores, 0.0, 2.0).tolist() == [1.0, 1.0, 1.0]


def test_advantages_weigh_by_the_bins_of_earlier_steps() -> None:
    """Two prompts with pass rates 1/4 and 3/4; a third is new, and one could not be graded."""
    method = gdro_of(width=0.5, rate=0.1, memory=0.5)
    step = rollouts_of([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, prompt_rows=[5, 2])
    ones = np.ones(8)
    assert method.advantages(step, ones, RNG).tolist() == ones.tolist()
    method.observe(step)
    assert (method.state.bins[5], method.state.bins[2], method.state.bins[0]) == (0, 1, -1)
    assert method.weights().tolist() == [1.0, 1.0]  # no bin has a score yet
    method.observe(step)
    easy, hard = np.exp(0.25), np.exp(0.75)  # 1 - mean reward: the start is corrected for
    mean = (easy + hard) / 2
    assert method.weights() == pytest.approx([hard / mean, easy / mean])
    method.observe(rollouts_of([1, 1, 0, 0], [0, 0, 1, 1], prompt_rows=[5, 2], errors=2))
    score = (0.75 * 0.9 * 0.1 + 0.1 * 0.0) / (1 - 0.9**2)  # of the bin of prompt 5
    assert method.weights()[0] == pytest.approx(np.exp(score) / ((np.exp(score) + easy) / 2))
    other = rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [2, 1, 1, 2], prompt_rows=[2, 0])
    found = method.advantages(other, np.array([1.0, 1, -1, 1, -1, -1]), RNG)
    weight = method.weights()[1]
    assert found == pytest.approx([weight, weight, -weight, 1, -1, -1])
    replayed = step.with_columns(replayed=True)
    before = method.state.rates.copy()
    method.observe(replayed)
    assert (method.state.rates == before).all()


def test_a_prompt_stays_in_its_bin_within_the_hysteresis() -> None:
    method = gdro_of(width=0.1, hysteresis=0.02)
    assert [method.bin_of(rate, -1) for rate in (0.0, 0.099, 0.1, 0.3, 0.95, 1.0)] == [
        0, 0, 1, 3, 9, 9
    ]  # fmt: skip
    assert [method.bin_of(rate, 3) for rate in (0.27, 0.29, 0.35, 0.41, 0.43)] == [2, 3, 3, 3, 4]
    assert len(gdro_of(width=0.3).state.scores) == 4
    for settings in ({"width": 0.0}, {"most": 0.5}):
        with pytest.raises(ParamsError, match="width is above 0 and at most 1, and most at least"):
            gdro_of(**settings)
