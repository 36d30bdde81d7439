"""`cov_mask`: a few of the tokens that lower the entropy most are not trained on (Clip-Cov, arXiv
2505.22617).

A token's covariance is (A - mean A) (log p - mean log p), with means over the step's own tokens. Of
the tokens whose covariance is between `low` and `high`, random ones get advantage 0: as many as the
share `drop` of the step's own tokens, at least one. They are drawn once per step, not at every
update of a batch as in the paper. The log-probabilities cost a pass, charged as scoring."""

import numpy as np

from tasks.common.params import ParamsError, above_zero, settings, share
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    drop: float = 2.0e-4  # share of the step's tokens
    low: float = 1.0  # covariance above which a token may be dropped
    high: float = 5.0  # covariance below which a token may be dropped

    def __post_init__(self) -> None:
        above_zero(train__shape__drop=self.drop)
        share(train__shape__drop=self.drop)
        if self.low >= self.high:
            raise ParamsError(
                f"train.shape cov_mask: low is {self.low:g} and high {self.high:g}; low must be "
                "below high"
            )


EXAMPLE = Settings(drop=0.2, low=-5.0, high=5.0)


class Method(Shape):
    settings: Settings
    features = Features()
    masks = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        assert rollouts.observed is not None
        places = np.flatnonzero(rollouts.trained_N())
        if not len(places):
            return advantages_N
        of_own = advantages_N[places], rollouts.observed.logprobs_N[places]
        gain, logprob = (values - values.mean() for values in of_own)
        covariance, settings = gain * logprob, self.settings
        inside = places[(covariance > settings.low) & (covariance < settings.high)]
        num = min(max(int(settings.drop * len(places)), 1), len(inside))
        masked_N = advantages_N.copy()
        masked_N[rng.choice(inside, num, replace=False)] = 0.0
        return masked_N
