"""`drift`: prompts with a pass rate near the target, by the profile's counts and later outcomes
(MoPPS, arXiv 2507.04632; rule from its recipe in verl, the profile as the first counts ours).

Every prompt has a Beta(a, b), at first the prior plus `profile_weight` times its counts in the
profile. A visit with k of n correct changes it to a <- discount a + (1 - discount) prior + k, and b
likewise with n - k, so that older outcomes count less as the policy changes. A step draws a rate of
each of `candidates` times as many prompts as it needs, and takes those nearest to `target`, except
for a share `explore` that is taken at random: selection near one half starves both ends. With
`choice: information` it takes those with the most information for their cost, as the control
`information` does, whose own belief reads no profile. Rollouts with an error are no failures. A
prompt that is not visited keeps its counts. Left out: a line of the recipe that, with one rollout a
prompt, sets the counts of the whole batch to 8."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.plan import Plan
from tasks.train.data.profile import Profile
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control.information import worth
from tasks.train.methods.control.prompt_pool import PoolControl, PromptPool

reads_profile = True


@settings
class Settings:
    discount: float = 0.8  # factor of a prompt's counts per visit; 1 keeps all
    target: float = 0.5  # pass rate of the preferred prompts
    candidates: int = 4  # candidate prompts per chosen prompt
    explore: float = 0.1  # share of the prompts that is taken at random
    prior: float = 1.0  # both parameters of the prior Beta
    profile_weight: float = 1.0  # factor of the profile's counts
    choice: Literal["target", "information"] = "target"
    update_cost: float = 3.0  # of information: cost of updating / generating a rollout

    def __post_init__(self) -> None:
        share(train__control__discount=self.discount, train__control__target=self.target)
        share(train__control__explore=self.explore)
        above_zero(train__control__prior=self.prior)
        at_least(1, train__control__candidates=self.candidates)
        at_least(0, train__control__profile_weight=self.profile_weight)
        at_least(0, train__control__update_cost=self.update_cost)


@dataclass
class State:
    """Both parameters of every prompt's Beta; the rollouts spent."""

    correct: Floats
    wrong: Floats
    spent: int = 0


class Method(PoolControl):
    def __init__(self, settings: Settings, plan: Plan, profile: Profile) -> None:
        self.settings, self.pool = settings, PromptPool.of(plan)
        correct, graded = profile.correct()
        first, weight = np.full(len(graded), settings.prior), settings.profile_weight
        self.state = State(first + weight * correct, first + weight * (graded - correct))

    def choose(self, room: int, rng: np.random.Generator) -> Ints:
        pool, state, wanted = self.pool, self.state, room * self.settings.candidates
        drawn = pool.take(rng.permutation(len(pool.prompt_rows)), wanted)
        rows = pool.prompt_rows[drawn]
        rates = rng.beta(state.correct[rows], state.wrong[rows])
        distance = np.abs(rates - self.settings.target)
        if self.settings.choice == "information":
            distance = 1.0 - worth(rates, self.settings.update_cost)
        explored = self.settings.explore * len(pool.take(drawn, room)) / len(rows)
        distance[rng.random(len(rows)) < explored] = -1.0
        return pool.take(drawn[np.argsort(distance, kind="stable")], room)

    def observe(self, rollouts: Rollouts) -> None:
        size_Q, correct_Q = rollouts.graded_Q()
        visited, group_Q = np.unique(rollouts.prompt_rows_Q[size_Q > 0], return_inverse=True)
        pairs = (self.state.correct, correct_Q), (self.state.wrong, size_Q - correct_Q)
        for counts, new_Q in pairs:
            new = np.bincount(group_Q, new_Q[size_Q > 0], len(visited))
            counts[visited] = discounted(counts[visited], self.settings) + new

    def describe(self) -> dict[str, float]:
        """Return the mean predicted pass rate of the plan's prompts."""
        rows, state = self.pool.prompt_rows, self.state
        means = state.correct[rows] / (state.correct[rows] + state.wrong[rows])
        return {"predicted_rate_mean": float(means.mean())}


def discounted(counts: Floats, settings: Settings) -> Floats:
    """Return counts of a Beta, prior included, after one more visit without its outcomes."""
    return settings.discount * counts + (1.0 - settings.discount) * settings.prior
