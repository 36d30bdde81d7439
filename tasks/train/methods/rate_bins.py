"""Bins of prompts by their running pass rates (GDRO, arXiv 2601.19280).

A prompt's running pass rate is in a bin of width `width`; the bin changes only when the rate leaves
it by more than `hysteresis`. `memory` is the weight of earlier groups in a rate."""

from typing import Any

import numpy as np

from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import ROUNDING
from tasks.train.data.rollouts import Rollouts


def learn(rates: Floats, bins: Ints, rollouts: Rollouts, settings: Any) -> None:
    """Update the rates and the bins (-1: none) of the prompts with graded rollouts, in place."""
    size_Q, correct_Q = rollouts.graded_Q()
    for group in np.flatnonzero(size_Q):
        row, rate = rollouts.prompt_rows_Q[group], correct_Q[group] / size_Q[group]
        before = rates[row] if bins[row] >= 0 else rate
        rates[row] = settings.memory * before + (1.0 - settings.memory) * rate
        bins[row] = bin_of(rates[row], int(bins[row]), settings)


def bin_of(rate: float, before: int, settings: Any) -> int:
    """Return the bin of a pass rate, for a prompt that was in the bin `before`."""
    width, slack = settings.width, settings.hysteresis
    if before >= 0 and before * width - slack <= rate <= (before + 1) * width + slack:
        return before
    return int(min(rate / width + ROUNDING, np.ceil(1.0 / width - ROUNDING) - 1.0))
