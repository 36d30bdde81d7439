"""`entropy_mask`: train only on the step's tokens with the highest entropy (arXiv 2506.01939).

`keep` is a share of the policy's own tokens in the step's rollouts (`train.advantage_over` sets
which rollouts), on all ranks. The entropies cost a pass over the step's rollouts, charged as
scoring; the update still computes every token."""

import numpy as np

from tasks.common.params import above_zero, settings, share
from tasks.train.rollouts import Features, Floats, Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    keep: float = 0.2  # share of the tokens

    def __post_init__(self) -> None:
        above_zero(train__shape__keep=self.keep)
        share(train__shape__keep=self.keep)


class Method(Shape):
    settings: Settings
    features = Features()
    masks = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        assert rollouts.observed is not None
        return of_largest(rollouts, advantages_N, rollouts.observed.entropies_N, self.settings.keep)


def of_largest(rollouts: Rollouts, advantages_N: Floats, values_N: Floats, keep: float) -> Floats:
    """Return [N] the advantages of the share `keep` of the step's own tokens with the largest
    values, and 0 for the others."""
    trained_N = rollouts.trained_N()
    if not trained_N.any():
        return advantages_N
    least = np.quantile(values_N[trained_N], 1.0 - keep)
    return np.where(values_N >= least, advantages_N, 0.0)
