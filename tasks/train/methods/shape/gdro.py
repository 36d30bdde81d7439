"""`gdro`: prompts of the difficulty with the largest loss weigh more (Prompt-GDRO, arXiv
2601.19280; rule from summaries).

A bin has the prompts of similar pass rates (`methods/rate_bins.py`). Its score is the running mean
of 1 - reward over its prompts. Its weight is exp(`eta` * score) divided by the mean over the bins
with a score, and at most `most`. Advantages are multiplied by the weight of their prompt's bin.
Bins and scores are from earlier steps, so the direction of a prompt's expected gradient is
unchanged. Prompts without a bin weigh 1. Left out: a sampling law from the same weights."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.rate_bins import bin_of, learn
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
        at_least(1, train__shape__most=self.most)
        above_zero(train__shape__clip=self.clip, train__shape__rate=self.rate)
        above_zero(train__shape__width=self.width)
        share(train__shape__rate=self.rate, train__shape__memory=self.memory)
        share(train__shape__width=self.width)


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
        self.settings, num = settings, bin_of(1.0, -1, settings) + 1
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
        learn(state.rates, state.bins, fresh, settings)


def bin_weights(scores: Floats, eta: float, most: float) -> Floats:
    """Return the weights of bins with these scores: exp(eta * score), normalised and capped."""
    weights = np.exp(eta * scores)
    return np.asarray(np.minimum(weights / weights.mean(), most))
