"""`noise_scale`: steps as large as the gradient's noise scale (McCandlish et al., 2018, arXiv
1812.06162; as a controller of the batch in COPUS, arXiv 2604.26687, here on one machine).

The noise scale is the number of groups at which the noise of the mean gradient equals its signal:
the trace of the covariance of a group's gradient / the squared norm of the expected gradient. With
fewer groups a step is mostly noise; with many more, rollouts are wasted. Both parts are measured at
every update, from the gradients of all groups and of every second one, and are averaged over steps
with `memory`. The next step takes `factor` times the noise scale, at least `smallest` and at most
all of `train.batch`, and its learning rate is multiplied by the root of its share of that batch.
With `smallest: 1` the noise scale is only recorded. Left out: the choice of a parallel layout."""

from dataclasses import dataclass, replace

import numpy as np

from tasks.common.params import above_zero, settings, share
from tasks.train.data.noise import GradientNoise
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.methods.control import plan as follow
from tasks.train.slots import SoFar


@settings
class Settings:
    factor: float = 1.0  # groups of a step / the noise scale
    smallest: float = 0.25  # smallest share of train.batch
    memory: float = 0.95  # weight of earlier steps in the measured parts

    def __post_init__(self) -> None:
        above_zero(train__control__factor=self.factor, train__control__smallest=self.smallest)
        share(train__control__smallest=self.smallest, train__control__memory=self.memory)


@dataclass
class State:
    """The next visit; the running means of the noise's two parts, without bias correction."""

    position: int = 0
    signal: float = 0.0
    variance: float = 0.0


class Method(follow.Method):
    reads_noise = True

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan, self.state = settings, plan, State()
        # the number of groups in a whole batch
        self.whole = max(plan.batch.size / plan.cost(plan.group_sizes_V).mean(), 1.0)

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        size = self.plan.batch.size
        shares = self.settings.smallest, self.settings.factor * self.noise_scale() / self.whole
        most = max(round(min(max(shares), 1.0) * size), 1)
        return super().next(replace(so_far, most=min(so_far.room(self.plan.batch), most)), rng)

    def noise_scale(self) -> float:
        """Return the noise scale in groups; infinity before the first update, and where noise hides
        the signal."""
        signal, variance = self.state.signal, max(self.state.variance, 0.0)
        return variance / signal if signal > 0.0 else float("inf")

    def observe_noise(self, noise: GradientNoise) -> None:
        state, memory = self.state, self.settings.memory
        state.signal = memory * state.signal + (1.0 - memory) * noise.signal
        state.variance = memory * state.variance + (1.0 - memory) * noise.variance

    def rate_factor(self, num_groups: int) -> float:
        return float(min(num_groups / self.whole, 1.0) ** 0.5)

    def describe(self) -> dict[str, float]:
        """Return the noise scale in groups; nothing while it is infinite."""
        scale = self.noise_scale()
        return {"noise_scale": scale} if np.isfinite(scale) else {}
