"""`poise`: the reward minus a prediction from the hidden states of the group's *other* rollouts
(POISE, arXiv 2605.07579; rule from the authors' code).

From one rollout (its prompt's last hidden states, its completion's last hidden states, its mean
entropy) a ridge regression predicts the mean reward of its group's other rollouts. A rollout's
baseline is the mean prediction from the others, so it does not depend on the rollout itself and the
gradient stays unbiased; two rollouts per prompt are enough. The regression is fitted after the
advantages are computed. Replay is refused: the regression may have been fitted to those rollouts.
Before the first fit, and in a group of one, the advantage is `rloo`'s. Groups with equal rewards
have a gradient, as rewards differ from predictions. Random projection replaces the paper's PCA."""

import numpy as np

from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import group_means
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.methods.advantage import probe, rloo
from tasks.train.methods.advantage.probe import EXAMPLE, Settings
from tasks.train.slots import Advantage

__all__ = ["EXAMPLE", "Method", "Settings"]

LAST_TOKENS = 10  # tokens at the end of a completion whose hidden states are averaged


class Method(Advantage):
    unshaped = True
    fresh_only = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.features = Features(hidden_layer=settings.layer)
        self.state = probe.new_state(2 * settings.dimensions + 2)

    def __call__(self, rollouts: Rollouts) -> Floats:
        plain_B = rloo.advantage(rollouts.rewards_B, rollouts.group_B)
        if not self.state.seen or not len(plain_B):
            return plain_B
        expected_B = probe.predict(self.state, self.rows(rollouts), self.settings.ridge)
        others_B, size_B = mean_of_others(expected_B, rollouts)
        return np.where(size_B > 1, rollouts.rewards_B - others_B, plain_B)

    def rows(self, rollouts: Rollouts) -> Floats:
        """Return [B, F] the features of each rollout for the regression."""
        observed, num = rollouts.observed, len(rollouts.group_B)
        assert observed is not None
        assert observed.hidden_ND is not None
        assert observed.prompt_hidden_BD is not None
        owner_N, lengths_B = rollouts.owner_N(), rollouts.completion_tokens_B()
        place_N = np.arange(len(owner_N)) - (np.cumsum(lengths_B) - lengths_B)[owner_N]
        is_last_N = place_N >= lengths_B[owner_N] - LAST_TOKENS
        ends_BD = np.zeros_like(observed.prompt_hidden_BD)
        np.add.at(ends_BD, owner_N[is_last_N], observed.hidden_ND[is_last_N])
        entropy_B = np.bincount(owner_N, observed.entropies_N, num) / np.maximum(lengths_B, 1)
        size = self.settings.dimensions
        parts = (probe.project(hidden, size) for hidden in (observed.prompt_hidden_BD, ends_BD))
        return np.column_stack([*parts, entropy_B, np.ones(num)])

    def observe(self, rollouts: Rollouts) -> None:
        graded = rollouts.where(~rollouts.is_error_B())
        targets_B, size_B = mean_of_others(graded.rewards_B, graded)
        chosen = graded.where(size_B > 1)
        if len(chosen.group_B):
            rows = self.rows(chosen)
            probe.learn(self.state, rows, targets_B[size_B > 1], self.settings.memory)


def mean_of_others(values_B: Floats, rollouts: Rollouts) -> tuple[Floats, Ints]:
    """Return [B] the mean of `values_B` over a group's other rollouts, and [B] the group's size."""
    mean_Q, size_Q = group_means(values_B, rollouts.group_B)
    size_B, mean_B = size_Q[rollouts.group_B], mean_Q[rollouts.group_B]
    return (mean_B * size_B - values_B) / np.maximum(size_B - 1, 1), size_B
