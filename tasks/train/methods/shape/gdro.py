"""`gdro`: prompts of the difficulty with the largest loss weigh more (Prompt-GDRO, arXiv
2601.19280; rule from summaries).

A prompt's running pass rate is in a bin of width `width`; the bin changes only when the rate leaves
it by more than `hysteresis`. The score of a bin is the running mean of 1 - reward over its prompts.
Its weight is exp(`eta` * score) divided by the mean over the bins with a score, and at most `most`.
Advantages are multiplied by the weight of their prompt's bin. Bins and scores are from earlier
steps, so the direction of a prompt's expected gradient is unchanged. Prompts without a bin weigh 1.
Left out: a sampling law from the same weights."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.common.params import ParamsError, above_zero, at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import ROUNDING, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape

reads_prompts = True


@settings
class Settings:
    width: float = 0.1  # width of a bin of pass rates
    hysteresis: float = 0.02  # distance outside its bin at which a prompt changes bins
    rate: float = 0.1  # weight of the latest step in a score
    memory: float = 0.5  # weight of earlier groups in a pass rate
    eta: float = 1.0  # sharpness of the weights; 0: all weights are 1
    clip: float = 5.0  # limit of |score|
    most: float = 2.0  # maximum weight

    def __post_init__(self) -> None:
        at_least(0, train__shape__eta=self.eta, train__shape__hysteresis=self.hysteresis)
        above_zero(train__shape__clip=self.clip, train__shape__rate=self.rate)
        share(train__shape__rate=self.rate, train__shape__memory=self.memory)
        if not 0.0 < self.width <= 1.0 or self.most < 1.0:
            raise ParamsError(
                f"train.shape gdro: width is {self.width:g} and most {self.most:g}; width is above "
                "0 and at most 1, and most at least 1"
            )


@dataclass
class State:
    """The pass rate of every prompt, and its bin (-1: none); the score of every bin before bias
    correction, and the number of steps that updated it."""

    rates: Floats
    bins: Ints
    scores: Floats
    steps: Ints


class Method(Shape):
    def __init__(self, settings: Settings, prompts: pl.DataFrame) -> None:
        self.settings, num = settings, int(np.ceil(1.0 / settings.width - ROUNDING))
        self.state = State(
            np.zeros(len(prompts)), np.full(len(prompts), -1), np.zeros(num), np.zeros(num, int)
        )

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        weights = np.append(self.weights(), 1.0)  # the last is of prompts without a bin
        bin_Q = self.state.bins[rollouts.prompt_rows_Q]
        return np.asarray(advantages_N * weights[bin_Q][rollouts.group_B][rollouts.owner_N()])

    def weights(self) -> Floats:
        """Return the weight of each bin; 1 for bins without a score."""
        state, settings = self.state, self.settings
        known, weights = state.steps > 0, np.ones(len(state.scores))
        if known.any():
            mass = 1.0 - (1.0 - settings.rate) ** state.steps[known]
            scores = np.clip(state.scores[known] / mass, -settings.clip, settings.clip)
            weights[known] = bin_weights(scores, settings.eta, settings.most)
        return weights

    def observe(self, rollouts: Rollouts) -> None:
        """Update the scores with the old bins, then the pass rates and the bins."""
        state, settings = self.state, self.settings
        fresh = rollouts.where(~rollouts.replayed_B & ~rollouts.is_error_B())
        groups = np.unique(fresh.group_B)
        rows = rollouts.prompt_rows_Q[groups]
        losses = 1.0 - group_means(fresh.rewards_B, fresh.group_B)[0][groups]
        for place in np.unique(state.bins[rows][state.bins[rows] >= 0]):
            loss = losses[state.bins[rows] == place].mean()
            state.scores[place] += settings.rate * (loss - state.scores[place])
            state.steps[place] += 1
        size_Q, correct_Q = fresh.graded_Q()
        for row, rate in zip(rows, correct_Q[groups] / size_Q[groups], strict=True):
            is_known = state.bins[row] >= 0
            before = state.rates[row] if is_known else rate
            state.rates[row] = settings.memory * before + (1.0 - settings.memory) * rate
            state.bins[row] = self.bin_of(state.rates[row], int(state.bins[row]))

    def bin_of(self, rate: float, before: int) -> int:
        """Return the bin of a pass rate, for a prompt that was in the bin `before`."""
        width, slack = self.settings.width, self.settings.hysteresis
        if before >= 0 and before * width - slack <= rate <= (before + 1) * width + slack:
            return before
        return min(int(rate / width + ROUNDING), len(self.state.scores) - 1)


def bin_weights(scores: Floats, eta: float, most: float) -> Floats:
    """Return the weights of bins with these scores: exp(eta * score), normalised and capped."""
    weights = np.exp(eta * scores)
    return np.asarray(np.minimum(weights / weights.mean(), most))
