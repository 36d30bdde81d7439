"""`dgg`: `clip`, but later epochs over a batch stop at an unusual gradient (dynamic gradient
gating, arXiv 2605.19425; a reconstruction from summaries).

Before each update of a later epoch, the gradient's squared norm and the change from the previous
norm are compared with those of the last `window` accepted updates. If either is more than `limit`
standard deviations above the mean, the gradient is dropped, the optimizer is unchanged, and the
batch's other updates are skipped. The first epoch is never gated, so with one epoch this is `clip`.
The norm is of the whole gradient, not the output head's as in the paper: tied heads and adapters
have no separate one. A step that ends early is charged for all of its epochs."""

from dataclasses import dataclass, field

import numpy as np

from tasks.common.params import above_zero, at_least, settings
from tasks.train.data.columns import Floats
from tasks.train.methods.loss import clip
from tasks.train.slots import Bonus

NOTHING = np.zeros(0)


@settings
class Settings(clip.Settings):
    limit: float = 0.5  # standard deviations above the mean
    window: int = 32  # number of accepted updates in the comparison

    def __post_init__(self) -> None:
        clip.Settings.__post_init__(self)
        above_zero(train__loss__limit=self.limit)
        at_least(2, train__loss__window=self.window)


@dataclass
class State(Bonus):
    """The squared norms of the most recent accepted gradients, the change of each norm from the
    previous one, and the squared norm of the current gradient, accepted or not."""

    norms: Floats = field(default_factory=NOTHING.copy)
    changes: Floats = field(default_factory=NOTHING.copy)
    latest: float = 0.0


class Method(clip.Method):
    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.state = State(self.entropy.coefficient)

    def rate_factor(self, log_weights_B: Floats, norm: float, reuse: int) -> float:
        state, square = self.state, norm**2
        change, state.latest = square - state.latest, square
        unusual = max(score(square, state.norms), score(change, state.changes))
        if reuse and unusual > self.settings.limit:
            return 0.0
        kept = slice(-self.settings.window, None)
        state.norms = np.append(state.norms, square)[kept]
        state.changes = np.append(state.changes, change)[kept]
        return 1.0


def score(value: float, others: Floats) -> float:
    """Return how many standard deviations a value is above the mean of `others`; 0 if there are
    fewer than two others, or if all are equal."""
    deviation = float(np.std(others)) if len(others) > 1 else 0.0
    return (value - float(others.mean())) / deviation if deviation else 0.0
