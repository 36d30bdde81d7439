"""`value_probe`: a separate advantage per token, the reward minus the value that a linear probe
predicts from the hidden state before that token.

The state that predicts a token does not depend on the token, so the baseline leaves the gradient
unbiased, as a critic's does; and it needs no second network (similar to PPO's value head, on frozen
features). The probe is a ridge regression of the final reward on the states of earlier steps'
tokens; it is fitted after the advantages are computed. Replayed rollouts are refused, since the
probe may be fitted to them. Before the first fit the advantage is `rloo`'s. Dead groups have a
gradient here. Left out: bootstrapping between tokens (lambda is 1)."""

import numpy as np

from tasks.train.methods.advantage import probe, rloo
from tasks.train.methods.advantage.probe import EXAMPLE, Settings
from tasks.train.rollouts import Features, Floats, Rollouts
from tasks.train.slots import Advantage

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Advantage):
    unshaped = True
    fresh_only = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.features = Features(hidden_layer=settings.layer)
        self.state = probe.new_state(settings.dimensions + 1)

    def __call__(self, rollouts: Rollouts) -> Floats:
        """Return [N] advantages of the completion tokens."""
        owner_N = rollouts.owner_N()
        if not self.state.seen or not len(owner_N):
            return rloo.advantage(rollouts.rewards_B, rollouts.group_B)[owner_N]
        values_N = probe.predict(self.state, self.rows(rollouts), self.settings.ridge)
        return np.asarray(rollouts.rewards_B[owner_N] - values_N)

    def rows(self, rollouts: Rollouts) -> Floats:
        """Return [N, F] the probe's features before each token."""
        assert rollouts.observed is not None
        assert rollouts.observed.hidden_ND is not None
        projected = probe.project(rollouts.observed.hidden_ND, self.settings.dimensions)
        return np.column_stack([projected, np.ones(len(projected))])

    def observe(self, rollouts: Rollouts) -> None:
        graded = rollouts.where(~rollouts.is_error_B())
        if len(graded.group_B):
            targets_N = graded.rewards_B[graded.owner_N()]
            probe.learn(self.state, self.rows(graded), targets_N, self.settings.memory)
