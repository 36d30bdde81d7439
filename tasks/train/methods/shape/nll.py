"""`nll`: imitate correct rollouts, in addition to the advantage (the term of LightningRL,
reconstructed from its code for diffusion models).

The advantage of correct rollouts' tokens grows by `weight` times the ratio of all the step's own
tokens to those of correct rollouts. On-policy, with a loss that is proportional to the advantage
and averaged over all tokens (`normalize: token`), this adds the gradient of `weight` times the mean
negative log-probability of the correct tokens. All-correct groups have a gradient, too. Other
averages weight the term like the advantage, and clips and importance weights apply to it. A
`select` other than `all` is refused unless divisor and advantages are over the kept rollouts, since
the weight would shrink with the dropped ones."""

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    weight: float = 0.1  # weight of the mean negative log-probability

    def __post_init__(self) -> None:
        at_least(0, train__shape__weight=self.weight)


class Method(Shape):
    settings: Settings
    needs_divisor = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        trained_N = rollouts.trained_N()
        is_correct_N = rollouts.is_correct_B()[rollouts.owner_N()] & trained_N
        share = trained_N.sum() / max(is_correct_N.sum(), 1)
        return np.asarray(advantages_N + self.settings.weight * share * is_correct_N)
