"""`entropy_mask`: train only on the step's tokens with the highest entropy (arXiv 2506.01939).

`keep` is a share of the policy's own tokens in the step's rollouts (`train.advantage_over` sets
which rollouts), on all ranks. The entropies cost a pass over the step's rollouts, charged as
scoring; the update still computes every token."""

import numpy as np

from tasks.common.params import above_zero, settings, share
from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING
from tasks.train.data.rollouts import Features, Rollouts
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
    """Return [N] the advantages, with 0 for the step's own tokens outside the share `keep` with the
    largest values; of equal values the first stay."""
    places = np.flatnonzero(rollouts.trained_N())
    num = len(places) - int(np.ceil((1.0 - keep) * (len(places) - 1) - ROUNDING))
    masked_N = advantages_N.copy()
    masked_N[places[np.argsort(-values_N[places], kind="stable")[num:]]] = 0.0
    return masked_N
