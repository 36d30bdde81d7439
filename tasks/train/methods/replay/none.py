"""`none`: strictly on-policy, nothing is kept."""

import numpy as np

from tasks.train.rollouts import Rollouts, State


def start() -> State:
    """No state."""
    return {}


def add(state: State, rollouts: Rollouts) -> None:
    """Forget them."""


def draw(state: State, rng: np.random.Generator) -> Rollouts | None:
    """Nothing to train on again."""
    return None
