"""The interval of the compute at which a recipe's frontier has the accuracy of another's.

At a fixed compute, the difference of both accuracies is a weighted sum of the accuracies of a few
points: the neighbours on both frontiers. The interval has every compute at which this difference is
not significant (Fieller, Journal of the Royal Statistical Society B 16, 1954). It has no end where
even the frontier's first or last point is not significantly different. tests/bench/coverage.py
measures the coverage.

Legend: N points, n points of a frontier, G places on it."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from flows.benchmark.frontier import Floats
from tasks.common.statistics import CONFIDENCE, Noise, variance_of

STEPS = 40  # between neighbours of a frontier; the ends are interpolated


@dataclass(frozen=True)
class Spread:
    """The standard deviation of the accuracies from different searches of one recipe, and its
    degrees of freedom."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Frontier:
    """A recipe's least log compute [n] for the accuracies [n], which rise, and the weights [n, N]
    of the points in them."""

    log_costs: Floats
    accuracies: Floats
    corners: Floats

    def reach(self, target: float) -> float:
        """Return the compute at which the accuracy reaches the target, interpolated in log compute:
        at least the lowest cost, infinite if never reached."""
        place = int((self.accuracies < target - 1e-12).sum())
        if place == len(self.accuracies):
            return np.inf
        ends = slice(max(place - 1, 0), place + 1)
        return float(np.exp(np.interp(target, self.accuracies[ends], self.log_costs[ends])))

    def weights(self, places_G: Floats) -> Floats:
        """Return the weights of the points [G, N] at these places, from 0 to n - 1."""
        numbers = range(len(self.corners))
        columns = [np.interp(places_G, numbers, column) for column in self.corners.T]
        return np.stack(columns, axis=1)


def frontier_of(points: Iterable[tuple[float, int]], noise: Noise) -> Frontier:
    """Return the frontier through points, each with its cost and its index in `noise`."""
    ordered = sorted(points, key=lambda point: point[0])
    costs, places = (np.array(values) for values in zip(*ordered, strict=True))
    means = noise.means[places]
    best = [int(np.argmax(means[: place + 1])) for place in range(len(means))]
    return Frontier(np.log(costs), means[best], np.eye(len(noise.means))[places[best]])


def spread_between(noise: Noise, searches: Sequence[Sequence[int]]) -> float:
    """Return the variance between searches that chose these points, one per budget: half the mean
    squared difference of two, minus the noise of the points. It may be negative."""
    pairs = [
        pair
        for searched in itertools.combinations(searches, 2)
        for pair in zip(*searched, strict=True)
    ]
    one, other = np.eye(len(noise.means))[np.array(pairs).T]
    differences = (one - other) @ noise.means
    return float((differences**2 - variance_of(noise, one - other)[0]).mean() / 2)


def compute_interval(
    mine: Frontier, other: Frontier, accuracy: float, noise: Noise, spread: Spread | None = None
) -> tuple[float, float]:
    """Return the 95 % interval of the compute at which `mine` is as accurate as `other` is where it
    reaches `accuracy`; 0 and infinity are open ends. With `spread`, both have a deviation due to
    their searches."""
    last = len(mine.corners) - 1
    places = np.linspace(0, last, last * STEPS + 1)
    there = np.interp(accuracy, other.accuracies, range(len(other.accuracies)))
    weights = mine.weights(places) - other.weights(np.atleast_1d(there))
    variance, freedom = variance_of(noise, weights)
    if spread is not None:
        searches = max(2 * spread.deviation**2, 1e-30)
        squares = variance**2 / freedom + searches**2 / spread.freedom
        variance = variance + searches
        freedom = variance**2 / squares
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, freedom) * np.sqrt(variance)
    above = weights @ noise.means
    log_cost = np.interp(places, range(last + 1), mine.log_costs)
    least, most = rise(log_cost, half + above), -rise(-log_cost[::-1], (half - above)[::-1])
    return float(np.exp(least)), float(np.exp(most))


def rise(x: Floats, y: Floats) -> float:
    """Return the first x, interpolated, at which y is not negative: -inf if already at the first x,
    the last x if nowhere."""
    place = int(np.argmax(y >= 0)) if (y >= 0).any() else len(y)
    if place in (0, len(y)):
        return float(x[-1]) if place else -np.inf
    return float(np.interp(0.0, y[place - 1 : place + 1], x[place - 1 : place + 1]))
