"""Validation accuracy as a monotone curve over compute, and the compute that an accuracy takes.

A validation curve is noisy, and the first of its points above a target is often a lucky one: first
touch comes too early, the more so the more often one looks. The curve of a recipe is therefore
fitted to the points of all its seeds together, as the non-decreasing curve next to them. A policy
that gets worse again is thus fitted by the mean of its later points.

Intervals are a parametric bootstrap: seeds are drawn anew, then each point of a drawn seed about
that seed's own fit, as widely as its interval says. A point's interval holds how the validation
prompts differ, which all points share, so these intervals are wide rather than narrow. Between
fitted points the curve is linear."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from tasks.common.statistics import Floats

ROUNDING = 1e-9  # of accuracies that are equal
CONFIDENCE = 0.95  # of the points' intervals, and of those made from them
ENDS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
# the accounts that recipes are compared by; the other one reproduces the figures of a paper
COMPARED = ("charged", "charged_mixed", "executed")
# what accuracy is shown over, and the column of it in a validation curve
AXES = {account: f"flops_{account}" for account in COMPARED} | {
    "rollouts": "rollouts",
    "seconds": "seconds",
}


@dataclass(frozen=True)
class Monotone:
    """A curve: compute (or rollouts, or seconds), increasing, and accuracy, non-decreasing."""

    flops: Floats
    accuracy: Floats

    def at(self, flops: Floats) -> Floats:
        """The accuracy at other points; beyond the ends that of the ends."""
        return np.interp(flops, self.flops, self.accuracy)

    def reaches(self, target: float) -> float:
        """The compute at which the curve reaches an accuracy; infinite where it does not."""
        place = int(np.searchsorted(self.accuracy, target - ROUNDING))
        if place == len(self.accuracy):
            return np.inf
        if place == 0:
            return float(self.flops[0])
        ends = slice(place - 1, place + 1)
        return float(np.interp(target, self.accuracy[ends], self.flops[ends]))


@dataclass(frozen=True)
class Fitted:
    """The curve of a recipe over one of AXES, and those of the bootstrap's draws."""

    curve: Monotone
    draws: Sequence[Monotone]

    def band(self) -> tuple[Floats, Floats]:
        """The 95 % interval of the accuracy at each point of the curve."""
        low, high = np.quantile([draw.at(self.curve.flops) for draw in self.draws], ENDS, axis=0)
        return low, high

    def compute_to(self, target: float) -> dict[str, float | None]:
        """The compute that an accuracy takes and its 95 % interval: `flops`, `low`, `high`; None
        for more than was spent. The target is taken as exact."""
        # an order statistic and no mean of two, as the next may be infinite
        ends = np.quantile(
            [draw.reaches(target) for draw in self.draws], ENDS, method="inverted_cdf"
        )
        values = dict(
            zip(("flops", "low", "high"), (self.curve.reaches(target), *ends), strict=True)
        )
        return {name: float(x) if np.isfinite(x) else None for name, x in values.items()}


def isotonic(values: npt.ArrayLike, weights: npt.ArrayLike) -> Floats:
    """The non-decreasing values next to `values` in weighted squares, of one row [N] or of many
    [R, N] with the same weights [N]: at each place the largest, over the places up to it where a
    mean may begin, of the smallest mean that reaches it (the min-max formula; Robertson, Wright and
    Dykstra, Order Restricted Statistical Inference, 1988)."""
    rows = np.asarray(values, np.float64)
    heavy = np.asarray(weights, np.float64)
    zero = np.zeros((*rows.shape[:-1], 1))
    sums = np.concatenate([zero, np.cumsum(rows * heavy, axis=-1)], axis=-1)
    ends = np.concatenate([[0.0], np.cumsum(heavy)])
    fitted = np.full(rows.shape, -np.inf)
    for start in range(rows.shape[-1]):
        means = sums[..., start + 1 :] - sums[..., start, None]
        means /= ends[start + 1 :] - ends[start]
        smallest = np.minimum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
        np.maximum(fitted[..., start:], smallest, out=fitted[..., start:])
    return fitted


def monotone(flops: Floats, accuracy: Floats) -> list[Monotone]:
    """Fit a curve to each row [R, N] of accuracies at the same places [N], in any order. Points at
    the same compute count as one, of their mean and their number as weight."""
    order = np.argsort(flops, kind="stable")
    places, starts, counts = np.unique(flops[order], return_index=True, return_counts=True)
    means = np.add.reduceat(accuracy[:, order], starts, axis=1) / counts
    return [Monotone(places, row) for row in isotonic(means, counts)]


def comparable(curve: pl.DataFrame) -> pl.DataFrame:
    """The points of a CURVE at which policies can be compared: the ends of decayed branches and of
    the run, and its start. Between them the learning rate has not decayed. All points of a run
    without branches: they show it as it went."""
    is_branch = pl.col("branch").is_not_null()
    if not curve["branch"].is_not_null().any():
        return curve
    place = pl.int_range(pl.len())
    return curve.filter(is_branch | (place == 0) | (place == pl.len() - 1))


def fit_curve(
    points: Sequence[pl.DataFrame], axis: str, num_bootstrap: int, rng: np.random.Generator
) -> Fitted:
    """Fit the CURVE tables of a recipe's seeds over one of AXES.

    Draws of a curve that has levelled off lie above it on average, because a fit that never falls
    takes the highest noise along: where they reach an accuracy is rather too early."""
    z = stats.norm.ppf(0.5 + CONFIDENCE / 2)
    flops = [part[AXES[axis]].to_numpy().astype(np.float64) for part in points]
    seen = [part["accuracy"].to_numpy() for part in points]
    fits = [monotone(x, y[None])[0].at(x) for x, y in zip(flops, seen, strict=True)]
    spreads = [
        (part["accuracy_high"] - part["accuracy_low"]).to_numpy() / (2 * z) for part in points
    ]
    draws = []
    # draws of the same seeds have their points at the same places, and are fitted together
    seeds = np.sort(rng.integers(0, len(points), (num_bootstrap, len(points))), axis=1)
    for chosen, count in zip(*np.unique(seeds, axis=0, return_counts=True), strict=True):
        middle, spread, places = (
            np.concatenate([of[seed] for seed in chosen]) for of in (fits, spreads, flops)
        )
        drawn = np.clip(rng.normal(middle, spread, (count, len(middle))), 0.0, 1.0)
        draws += monotone(places, drawn)
    (curve,) = monotone(np.concatenate(flops), np.concatenate(seen)[None])
    return Fitted(curve, draws)
