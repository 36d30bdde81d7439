"""`overlong`: a penalty that grows over the last tokens before the limit (DAPO's soft over-long
punishment, arXiv 2503.14476).

The penalty is 0 until the last `share` of the limit, then grows linearly to 1 at the limit."""

import numpy as np

from tasks.common.params import above_zero, settings, share
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    share: float = 0.25  # last share of the token limit, over which the penalty grows

    def __post_init__(self) -> None:
        above_zero(train__shape__share=self.share)
        share(train__shape__share=self.share)


class Method(Shape):
    settings: Settings
    changes_rewards = True

    def rewards(self, rollouts: Rollouts, max_tokens: int) -> Floats:
        width = self.settings.share * max_tokens
        excess_B = rollouts.completion_tokens_B() - (max_tokens - width)
        return rollouts.rewards_B - np.clip(excess_B / width, 0.0, 1.0)
