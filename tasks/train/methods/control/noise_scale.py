"""`noise_scale`: steps as large as the gradient's noise scale (McCandlish et al., 2018, arXiv
1812.06162; as a controller of the batch in COPUS, arXiv 2604.26687, here on one machine).

The noise scale is the number of groups at which the noise of the mean gradient equals its signal:
the trace of the covariance of a group's gradient / the squared norm of the expected gradient. With
fewer groups a step is mostly noise; with many more, rollouts are wasted. Both parts are measured in
every step, from the gradients of all groups and of every second one, and are averaged over steps
with `memory`. After `first` steps a step takes `factor` times the noise scale, at least `smallest`
of a batch and two groups, and at most all of `train.batch`; its learning rate is multiplied by the
root of its share of the batch. With `smallest: 1` the noise scale is only recorded. Left out: the
choice of a parallel layout."""

from dataclasses import dataclass, replace

import numpy as np

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.noise import GradientNoise
from tasks.train.data.plan import Plan
from tasks.train.data.prompts import GroupRequest
from tasks.train.methods.control import plan as follow
from tasks.train.slots import SoFar

LEAST = 2  # groups of a step, since fewer have no measurable noise


@settings
class Settings:
    factor: float = 1.0  # groups of a step / the noise scale
    smallest: float = 0.25  # smallest share of train.batch
    memory: float = 0.95  # weight of earlier steps in the measured parts
    first: int = 10  # whole steps that are measured before one is smaller

    def __post_init__(self) -> None:
        above_zero(train__control__factor=self.factor, train__control__smallest=self.smallest)
        share(train__control__smallest=self.smallest, train__control__memory=self.memory)
        at_least(1, train__control__first=self.first)


@dataclass
class State:
    """The next visit; the running means of the noise's two parts, without bias correction, and
    their number of steps; the present step's share of a batch."""

    position: int = 0
    signal: float = 0.0
    variance: float = 0.0
    steps: int = 0
    share: float = 1.0


class Method(follow.Method):
    reads_noise = True

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan, self.state = settings, plan, State()
        self.group_cost = float(plan.cost(plan.group_sizes_V).mean())

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        if not so_far.num_requests:
            room = so_far.room(self.plan.batch)
            num_groups = max(self.settings.factor * self.noise_scale(), LEAST)
            needed = max(num_groups * self.group_cost / room, self.settings.smallest)
            self.state.share = min(needed, 1.0) if self.state.steps >= self.settings.first else 1.0
            if self.state.share < 1.0:
                groups = max(round(self.state.share * room / self.group_cost), LEAST)
                so_far = replace(so_far, most=min(int(np.ceil(groups * self.group_cost)), room))
        return super().next(so_far, rng)

    def noise_scale(self) -> float:
        """Return the noise scale in groups; infinity before the first update, and where noise hides
        the signal."""
        signal, variance = self.state.signal, max(self.state.variance, 0.0)
        return variance / signal if signal > 0.0 else float("inf")

    def observe_noise(self, noise: GradientNoise) -> None:
        state, memory = self.state, self.settings.memory
        state.signal = memory * state.signal + (1.0 - memory) * noise.signal
        state.variance = memory * state.variance + (1.0 - memory) * noise.variance
        state.steps += 1

    def rate_factor(self) -> float:
        return float(self.state.share**0.5)

    def describe(self) -> dict[str, float]:
        """Return the noise scale in groups, and the step's share of a batch."""
        scale = self.noise_scale()
        known = {"noise_scale": scale} if np.isfinite(scale) else {}
        return {**known, "batch_share": self.state.share}
