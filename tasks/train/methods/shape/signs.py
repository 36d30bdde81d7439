"""`signs`: factors on positive and on negative advantages (arXiv 2506.01347).

With `advantage: {method: raw, wrong: -1}` the factors (1, 0) are the paper's positive-sample
reinforcement, (0, 1) its negative-sample reinforcement, and (0.1, 1) its weighted REINFORCE."""

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    positive: float = 1.0  # factor of positive advantages
    negative: float = 1.0  # factor of negative advantages

    def __post_init__(self) -> None:
        at_least(0, train__shape__positive=self.positive, train__shape__negative=self.negative)


EXAMPLE = Settings(positive=0.1, negative=1.0)


class Method(Shape):
    settings: Settings

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        settings = self.settings
        factor_N = np.where(advantages_N > 0.0, settings.positive, settings.negative)
        return np.asarray(advantages_N * factor_N)
