"""`value_probe`: a separate advantage per token, the reward minus the value that a linear probe
predicts from the hidden state before that token.

The state that predicts a token does not depend on the token, so the baseline leaves the gradient
unbiased, as a critic's does; and it needs no second network (similar to PPO's value head, on frozen
features). The probe is a ridge regression of the final reward on the states of earlier steps'
tokens; it is fitted after the advantages are computed. Replay is refused: the probe may have been
fitted to those rollouts. Before the first fit the advantage is `rloo`'s. Groups with equal rewards
have a gradient.

With `lam` below 1 the advantage is the generalised one (GAE, arXiv 1506.02438) without discount:
the probe's values of later tokens partly replace the reward. It then has less variance, and a bias
where the probe is wrong."""

import numpy as np

from tasks.common.params import settings, share
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.methods.advantage import probe, rloo
from tasks.train.slots import Advantage


@settings
class Settings(probe.Settings):
    lam: float = 1.0  # GAE's lambda; 1: the reward minus the value

    def __post_init__(self) -> None:
        super().__post_init__()
        share(train__advantage__lam=self.lam)


EXAMPLE = Settings(layer=-1, dimensions=4, ridge=1.0, memory=0.9, lam=0.95)


class Method(Advantage):
    unshaped = True
    fresh_only = True
    min_group = 1  # only the first step needs groups

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
        errors_N, own_N = rollouts.rewards_B[owner_N] - values_N, rollouts.trained_N()
        errors_N[own_N] = generalised(errors_N[own_N], owner_N[own_N], self.settings.lam)
        return np.asarray(errors_N)

    def rows(self, rollouts: Rollouts) -> Floats:
        """Return the probe's features [N, F], from the hidden state before each token."""
        assert rollouts.observed is not None
        assert rollouts.observed.hidden_ND is not None
        projected = probe.project(rollouts.observed.hidden_ND, self.settings.dimensions)
        return np.column_stack([projected, np.ones(len(projected))])

    def observe(self, rollouts: Rollouts) -> None:
        graded = rollouts.where(~rollouts.is_error_B())
        if len(graded.group_B):
            targets_N = graded.rewards_B[graded.owner_N()]
            probe.learn(self.state, self.rows(graded), targets_N, self.settings.memory)


def generalised(errors_N: Floats, row_N: Ints, lam: float) -> Floats:
    """Return [N] the generalised advantages of tokens, rollout after rollout; `errors_N` is the
    reward minus the value before each token. An advantage is the token's own error minus
    (1 - lambda) times the sum of the rollout's later errors, discounted by lambda."""
    errors, rows = errors_N.tolist(), row_N.tolist()
    later = [0.0] * len(errors)
    for token in range(len(errors) - 2, -1, -1):
        if rows[token] == rows[token + 1]:
            later[token] = errors[token + 1] + lam * later[token + 1]
    return errors_N - (1.0 - lam) * np.array(later)
