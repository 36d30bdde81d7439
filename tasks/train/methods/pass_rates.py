"""Posteriors of the prompts' pass rates before they are sampled again.

A prompt has a Beta posterior of its own outcomes, with a prior around the rate of its stratum: the
prompts of one source, one level and similar length. A stratum's prior is around the rate of all
prompts. So the estimate for a prompt that was never sampled comes from similar prompts, and a
rising rate is noticed even if few prompts are sampled twice. Older outcomes have less weight: the
estimates of a prompt and a stratum cover a window of rollouts each.

The weight of a stratum in its prompts' estimates is also estimated. The likeness l of two rollouts
of a prompt (intraclass correlation) is the share of the outcomes' variance that is between a
stratum's prompts; a stratum then counts for 1 / l - 1 rollouts, as in a Beta of that spread. l is
measured on pairs of a prompt's rollouts, from one group or from two visits: the mean product of
their outcomes is the mean of p^2. If strata carry no information and half of the prompts have
constant outcomes, a stratum counts for 1 or 2 rollouts, so a prompt's own rollouts dominate.

Legend: P training prompts by row, S strata, Q groups."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.common.params import ParamsError, settings
from tasks.train.data.columns import Floats, Ints

LENGTH_PARTS = 8  # number of equal parts of a source's prompts, by length
LIKENESS = (1.0 / 65.0, 1.0 / 1.25)  # a stratum counts for 64 rollouts at most, 1/4 at least
LIKENESS_WEIGHT = 4.0  # weight of the initial likeness, in variance of outcomes: 16 even groups
LIKENESS_WINDOW = 64.0  # window of the estimate, in variance of outcomes


@settings
class PriorSettings:
    strength: float = 8.0  # initial weight of a stratum's rate, and of the overall one, in rollouts
    prompt_window: float = 8.0  # latest rollouts in a prompt's estimate
    stratum_window: float = 64.0  # latest rollouts in a stratum's estimate

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ParamsError(f"prior.{name} is {value}; it is a number of rollouts, above 0")


@dataclass
class Belief:
    """Discounted successes and trials of every prompt and of every stratum; the variance between a
    stratum's prompts, and the total variance, each summed over groups."""

    correct: Floats
    trials: Floats
    stratum_correct: Floats
    stratum_trials: Floats
    between: float = 0.0
    total: float = 0.0


class PassRates:
    """The posterior of every training prompt's pass rate. All mutable state is in `belief`."""

    def __init__(self, settings: PriorSettings, prompts: pl.DataFrame) -> None:
        self.settings, self.strata_P = settings, strata_of(prompts)
        num, num_strata = len(prompts), int(self.strata_P.max(initial=-1)) + 1
        self.belief = Belief(
            np.zeros(num), np.zeros(num), np.zeros(num_strata), np.zeros(num_strata)
        )

    def strength(self) -> float:
        """Return the weight of a stratum's rate in its prompts' estimates, in rollouts."""
        first = 1.0 / (self.settings.strength + 1.0)
        likeness = (self.belief.between + LIKENESS_WEIGHT * first) / (
            self.belief.total + LIKENESS_WEIGHT
        )
        return float(1.0 / np.clip(likeness, *LIKENESS) - 1.0)

    def prior(self, rows: Ints) -> Floats:
        """Return the estimated rate of each prompt's stratum, for the prompts `rows`."""
        belief, strength, strata = self.belief, self.settings.strength, self.strata_P[rows]
        # of all prompts; half a success in one trial is the prior
        mean = (belief.stratum_correct.sum() + 0.5) / (belief.stratum_trials.sum() + 1.0)
        return np.asarray(
            (belief.stratum_correct[strata] + strength * mean)
            / (belief.stratum_trials[strata] + strength)
        )

    def beta(self, rows: Ints) -> tuple[Floats, Floats]:
        """Return the two parameters of the posterior Beta of each prompt in `rows`."""
        belief, strength, prior = self.belief, self.strength(), self.prior(rows)
        wrong = belief.trials[rows] - belief.correct[rows]
        return belief.correct[rows] + strength * prior, wrong + strength * (1.0 - prior)

    def add(self, prompt_rows_Q: Ints, group_B: Ints, share_B: Floats) -> None:
        """Update with a step's rollouts: `group_B` is the group of each, and `share_B` its success
        from 0 to 1. Groups without a rollout change nothing."""
        belief, settings, num_groups = self.belief, self.settings, len(prompt_rows_Q)
        correct_Q, squares_Q = (
            np.bincount(group_B, values_B, num_groups).astype(np.float64)
            for values_B in (share_B, share_B**2)
        )
        size_Q = np.bincount(group_B, minlength=num_groups)
        self.learn_likeness(prompt_rows_Q, (correct_Q**2 - squares_Q) / 2.0, correct_Q, size_Q)
        rows, group_of = np.unique(prompt_rows_Q, return_inverse=True)
        for correct, trials, places, of_Q, window in (
            (belief.correct, belief.trials, rows, group_of, settings.prompt_window),
            (
                belief.stratum_correct,
                belief.stratum_trials,
                np.arange(len(belief.stratum_trials)),
                self.strata_P[prompt_rows_Q],
                settings.stratum_window,
            ),
        ):
            correct[places] += np.bincount(of_Q, correct_Q, len(places))
            trials[places] += np.bincount(of_Q, size_Q, len(places))
            share = np.minimum(window / np.maximum(trials[places], window), 1.0)
            correct[places] *= share
            trials[places] *= share

    def learn_likeness(
        self, prompt_rows_Q: Ints, both_Q: Floats, correct_Q: Floats, size_Q: Ints
    ) -> None:
        """Update the likeness (see the module) from pairs of a prompt's rollouts: pairs within a
        group (`both_Q` counts those with both correct), and pairs with earlier rollouts."""
        belief = self.belief
        before, seen = belief.correct[prompt_rows_Q], belief.trials[prompt_rows_Q]
        pairs_Q = size_Q * (size_Q - 1.0) / 2.0 + size_Q * seen
        both_Q = both_Q + correct_Q * before
        prior_Q, known_Q = self.prior(prompt_rows_Q), pairs_Q > 0
        square_Q = np.divide(both_Q, pairs_Q, out=np.zeros(len(pairs_Q)), where=known_Q)
        kept = min(LIKENESS_WINDOW / max(belief.total, LIKENESS_WINDOW), 1.0)
        belief.between = kept * belief.between + float((square_Q - prior_Q**2)[known_Q].sum())
        belief.total = kept * belief.total + float((prior_Q * (1.0 - prior_Q))[known_Q].sum())


def strata_of(prompts: pl.DataFrame) -> Ints:
    """Return [P] the index of each prompt's stratum: one source, one level and similar length."""
    place = pl.col("prompt").str.len_chars().rank("average").over("source") - 1.0
    part = (place * LENGTH_PARTS / pl.len().over("source")).floor().cast(pl.Int64)
    kinds = prompts.select("source", "level", part=part).select(
        pl.struct("source", "level", "part").rank("dense") - 1
    )
    return kinds.to_series().to_numpy().astype(np.int64)
