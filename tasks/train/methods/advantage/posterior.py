"""`posterior`: the reward against what was known of the prompt before, one-sided where it is sure.

The baseline of a rollout is the mean of its prompt's posterior (`tasks/train/pass_rates.py`) with
the outcomes of the *other* rollouts of its group added. It does not depend on the rollout itself,
so the gradient is unbiased, and it needs no group: where a group of G loses a share of 1/G of the
information to its own mean, and all of it where all outcomes are equal, this loses none. Groups of
one or two then show the policy more prompts for the same rollouts.

Where the posterior alone says that the rarer outcome has a share below m* = c / (1 + 2 c), the
baseline is 0 or 1 instead: rollouts of the commoner outcome have advantage 0 and are not updated.
`update_cost` c is the cost of updating a rollout over that of generating it (3 in FLOPs); 0 updates
all rollouts. Unlike `one_sided`, whose side is the majority of the group itself, the side does not
depend on the rollouts, and nothing is shrunk. A prompt that turns out against its side is updated
whole.

Rewards are taken for shares between the lowest and the highest that were ever seen.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.train.methods.advantage.one_sided import evenest_share
from tasks.train.pass_rates import EXAMPLE_PRIOR, Belief, PassRates, PriorSettings
from tasks.train.rollouts import Floats, Rollouts
from tasks.train.slots import Advantage

reads_prompts = True


@dataclass(frozen=True)
class Settings:
    update_cost: float
    prior: PriorSettings

    def __post_init__(self) -> None:
        evenest_share(self.update_cost)


EXAMPLE = Settings(update_cost=3.0, prior=EXAMPLE_PRIOR)


@dataclass
class State(Belief):
    """What is known of pass rates; the lowest and the highest reward so far."""

    low: float = np.inf
    high: float = -np.inf


class Method(Advantage):
    skips_zeros = True
    needs_group = False

    def __init__(self, settings: Settings, prompts: pl.DataFrame) -> None:
        self.evenest = evenest_share(settings.update_cost)
        self.rates = PassRates(settings.prior, prompts)
        self.state = self.rates.belief = State(**vars(self.rates.belief))

    def __call__(self, rollouts: Rollouts) -> Floats:
        group_B, num_groups = rollouts.group_B, len(rollouts.prompt_rows_Q)
        low, high, share_B = self.shares(rollouts.rewards_B)
        first_Q, second_Q = self.rates.beta(rollouts.prompt_rows_Q)
        sum_Q = np.bincount(group_B, share_B, num_groups)
        size_Q = np.bincount(group_B, minlength=num_groups)
        others_B = (first_Q + sum_Q)[group_B] - share_B
        total_B = (first_Q + second_Q + size_Q)[group_B] - 1.0
        baseline_B = low + (high - low) * others_B / total_B
        prior_Q = first_Q / (first_Q + second_Q)
        is_sure_Q = np.minimum(prior_Q, 1.0 - prior_Q) < self.evenest
        side_Q = np.where(prior_Q > 0.5, high, low)
        chosen_B = np.where(is_sure_Q[group_B], side_Q[group_B], baseline_B)
        return np.asarray(rollouts.rewards_B - chosen_B)

    def shares(self, rewards_B: Floats) -> tuple[float, float, Floats]:
        """The lowest and the highest reward known, and where between them each reward lies."""
        low = float(min(self.state.low, rewards_B.min(initial=np.inf)))
        high = float(max(self.state.high, rewards_B.max(initial=-np.inf)))
        spread = high - low if high > low else 1.0
        return low, high, (rewards_B - low) / spread

    def observe(self, rollouts: Rollouts) -> None:
        """Add the step's fresh, graded rollouts to what is known of their prompts."""
        fresh = rollouts.where(~rollouts.replayed_B & ~rollouts.is_error_B())
        self.state.low, self.state.high, share_B = self.shares(fresh.rewards_B)
        self.rates.add(fresh.prompt_rows_Q, fresh.group_B, share_B)
