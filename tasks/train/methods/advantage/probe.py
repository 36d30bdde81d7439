"""Shared code of the advantages that predict rewards from hidden states: a ridge regression, stored
as sums.

Hidden states are projected to a few numbers by a fixed random matrix (Johnson and Lindenstrauss,
1984), so that the sums are small for any model. Each step multiplies the weight of older batches by
`memory`."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import above_zero, at_least, settings, share
from tasks.train.data.columns import Floats, Singles

SEED = 0  # seed of the projection, which is the same in every run


@settings
class Settings:
    layer: int = -1  # layer of the hidden states; -1: the last
    dimensions: int = 32  # dimensions of the projection
    ridge: float = 10.0  # penalty of the ridge regression
    memory: float = 0.95  # factor of earlier sums per step

    def __post_init__(self) -> None:
        at_least(1, train__advantage__dimensions=self.dimensions)
        share(train__advantage__memory=self.memory)
        above_zero(train__advantage__ridge=self.ridge)


EXAMPLE = Settings(layer=-1, dimensions=4, ridge=1.0, memory=0.9)


@dataclass
class State:
    """The discounted sums of x x' and x y (features x, target y), and the discounted row count."""

    products: Floats
    targets: Floats
    seen: float = 0.0


def new_state(num_features: int) -> State:
    return State(np.zeros((num_features, num_features)), np.zeros(num_features))


def project(hidden: Floats | Singles, dimensions: int) -> Floats:
    """Return the product [n, dimensions] of the rows of `hidden` [n, D], each divided by its norm,
    and a fixed random matrix that preserves norms on average."""
    matrix = np.random.default_rng(SEED).standard_normal((hidden.shape[1], dimensions))
    norms = np.maximum(np.linalg.norm(hidden, axis=1, keepdims=True), 1e-12)
    return np.asarray(hidden / norms @ matrix / np.sqrt(dimensions))


def learn(state: State, features: Floats, targets: Floats, memory: float) -> None:
    """Discount the sums, and add these rows, except rows that are not finite, which would make the
    sums non-finite forever."""
    is_finite = np.isfinite(features).all(axis=1) & np.isfinite(targets)
    features, targets = features[is_finite], targets[is_finite]
    state.products = memory * state.products + features.T @ features
    state.targets = memory * state.targets + features.T @ targets
    state.seen = memory * state.seen + len(features)


def predict(state: State, features: Floats, ridge: float) -> Floats:
    """Return [n] predicted rewards within [0, 1]. The ridge does not penalise the last feature,
    which is constant."""
    penalty = np.full(len(state.targets), ridge)
    penalty[-1] = 1e-9
    weights = np.linalg.solve(state.products + np.diag(penalty), state.targets)
    return np.clip(features @ weights, 0.0, 1.0)
