"""`posterior`: the reward minus the prompt's predicted reward; one-sided if that is near 0 or 1.

The baseline of a rollout is the mean of its prompt's posterior (`methods/pass_rates.py`) with the
outcomes of the *other* rollouts of its group added. It does not depend on the rollout itself, so
the gradient is unbiased. It needs no group: groups of one or two cover more prompts with the same
number of rollouts. As a baseline, the mean of a group of G costs 1/G of the information, and all of
it if all outcomes are equal. A predicted baseline b instead adds (b - p)^2 to the second moment
p (1 - p). On prompts chosen by `control: information`, with constant pass rates, this costs about a
tenth of the information (8 to 13 %, `tests/train/test_winnow.py`).

If the posterior alone predicts a share of the rarer outcome below m* = c / (1 + 2 c), the baseline
is 0 or 1 instead: rollouts of the more frequent outcome have advantage 0 and are not trained on. c,
`update_cost`, is the cost of training on a rollout relative to generating it (3 in FLOPs); with 0
all are trained on. In `one_sided` the side is the majority of the group itself; here it does not
depend on the rollouts, so the gradient is not shrunk. If all rollouts of a prompt have the rarer
outcome, all are trained on.

Pass rates count outcomes. They become a baseline in rewards through the mean reward of correct and
of wrong rollouts in earlier steps, initially 1 and 0. If the rewards of one outcome differ, as in
composites, both outcomes are trained on. Baselines include the rollouts of earlier steps, so replay
is refused: replayed rollouts would be part of their own baseline.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.common.params import settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.advantage.one_sided import evenest_share
from tasks.train.methods.pass_rates import Belief, PassRates, PriorSettings
from tasks.train.slots import Advantage

reads_prompts = True


@settings
class Settings:
    update_cost: float = 3.0  # cost of updating / generating a rollout; 3 in FLOPs
    prior: PriorSettings = PriorSettings()  # same as in the control `information`

    def __post_init__(self) -> None:
        evenest_share(self.update_cost)


@dataclass
class State(Belief):
    """The belief about pass rates; the number of correct and of wrong rollouts so far and the sum
    of their rewards; and whether the rewards of each outcome were all equal."""

    num_correct: float = 0.0
    num_wrong: float = 0.0
    correct_rewards: float = 0.0
    wrong_rewards: float = 0.0
    are_equal: bool = True


class Method(Advantage):
    unshaped = True
    skips_zeros = True
    needs_group = False
    fresh_only = True

    def __init__(self, settings: Settings, prompts: pl.DataFrame) -> None:
        self.evenest = evenest_share(settings.update_cost)
        self.rates = PassRates(settings.prior, prompts)
        self.state = self.rates.belief = State(**vars(self.rates.belief))

    def __call__(self, rollouts: Rollouts) -> Floats:
        group_B, num_groups = rollouts.group_B, len(rollouts.prompt_rows_Q)
        correct_B = rollouts.is_correct_B().astype(np.float64)
        first_Q, second_Q = self.rates.beta(rollouts.prompt_rows_Q)
        sum_Q = np.bincount(group_B, correct_B, num_groups)
        size_Q = np.bincount(group_B, minlength=num_groups)
        others_B = (first_Q + sum_Q)[group_B] - correct_B
        total_B = (first_Q + second_Q + size_Q)[group_B] - 1.0
        wrong, correct = self.levels()
        baseline_B = wrong + (correct - wrong) * others_B / total_B
        prior_Q = first_Q / (first_Q + second_Q)
        is_sure_Q = np.minimum(prior_Q, 1.0 - prior_Q) < self.evenest
        side_Q = np.where(prior_Q > 0.5, correct, wrong)
        is_silent_B = (is_sure_Q & self.state.are_equal)[group_B]
        advantages_B = rollouts.rewards_B - np.where(is_silent_B, side_Q[group_B], baseline_B)
        is_none_B = np.abs(advantages_B) <= ROUNDING * max(abs(correct), abs(wrong))
        return np.where(is_none_B, 0.0, advantages_B)

    def levels(self) -> tuple[float, float]:
        """Return the mean reward of wrong and of correct rollouts in earlier steps."""
        state = self.state
        wrong = state.wrong_rewards / state.num_wrong if state.num_wrong else 0.0
        correct = state.correct_rewards / state.num_correct if state.num_correct else 1.0
        return wrong, correct

    def observe(self, rollouts: Rollouts) -> None:
        graded, state = rollouts.where(~rollouts.is_error_B()), self.state
        is_correct_B = graded.is_correct_B()
        right, wrong = graded.rewards_B[is_correct_B], graded.rewards_B[~is_correct_B]
        state.num_correct += float(len(right))
        state.num_wrong += float(len(wrong))
        state.correct_rewards += float(right.sum())
        state.wrong_rewards += float(wrong.sum())
        for rewards, level in zip((wrong, right), self.levels(), strict=True):
            gaps = np.abs(rewards - level)
            state.are_equal &= bool((gaps <= ROUNDING * np.maximum(np.abs(rewards), 1e-9)).all())
        self.rates.add(graded.prompt_rows_Q, graded.group_B, is_correct_B.astype(np.float64))
