"""Validation accuracy as a monotone curve over compute, and the compute that an accuracy requires.

A validation curve is noisy, and its first point above a target is often due to luck. So the first
crossing comes too early, especially with frequent validation. The curve of a recipe is therefore
the non-decreasing curve fitted to the points of all its seeds together. Where accuracy falls, the
fit is the mean of the points around the fall.

Intervals come from a parametric bootstrap: seeds are resampled, then each point of a drawn seed is
drawn around that seed's own fit, with the spread given by the point's interval. This interval
includes the variance over validation prompts, which all points share, so the derived intervals tend
to be too wide. The curve is linear between fitted points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy import optimize, stats

from tasks.common.statistics import CONFIDENCE, Floats

ROUNDING = 1e-9  # tolerance for equal accuracies
ENDS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
# the accounts in which recipes are compared; the other one reproduces the figures of a paper
COMPARED = ("charged", "charged_mixed", "executed")
# the x axes of accuracy, and their columns in a validation curve
AXES = {account: f"flops_{account}" for account in COMPARED} | {"rollouts": "rollouts"}
# units of FLOPs, the largest first
PREFIXES = (
    (1e18, "EFLOPs"),
    (1e15, "PFLOPs"),
    (1e12, "TFLOPs"),
    (1e9, "GFLOPs"),
    (1e6, "MFLOPs"),
    (1.0, "FLOPs"),
)


@dataclass(frozen=True)
class Monotone:
    """A monotone curve: ascending `flops` (or rollouts), and `accuracy` that never decreases."""

    flops: Floats
    accuracy: Floats

    def at(self, flops: Floats) -> Floats:
        """Return the accuracy at these amounts of compute; constant beyond the curve's ends."""
        return np.interp(flops, self.flops, self.accuracy)

    def reaches(self, target: float) -> float:
        """Return the least compute with at least this accuracy on the curve; infinite if none."""
        place = int(np.searchsorted(self.accuracy, target - ROUNDING))
        if place == len(self.accuracy):
            return np.inf
        if place == 0:
            return float(self.flops[0])
        ends = slice(place - 1, place + 1)
        return float(np.interp(target, self.accuracy[ends], self.flops[ends]))


@dataclass(frozen=True)
class Fitted:
    """The curve of a recipe over one of AXES, and the curves of the bootstrap draws."""

    curve: Monotone
    draws: Sequence[Monotone]

    def band(self) -> tuple[Floats, Floats]:
        """Return (low, high), the 95 % interval of the accuracy at each point of the curve."""
        low, high = np.quantile([draw.at(self.curve.flops) for draw in self.draws], ENDS, axis=0)
        return low, high

    def compute_to(self, target: float) -> dict[str, float | None]:
        """Return the compute that an accuracy requires and its 95 % interval: `flops`, `low`,
        `high`; None for a value beyond the compute spent. The target is treated as exact."""
        # an order statistic, not a mean of two: the next value may be infinite
        ends = np.quantile(
            [draw.reaches(target) for draw in self.draws], ENDS, method="inverted_cdf"
        )
        values = dict(
            zip(("flops", "low", "high"), (self.curve.reaches(target), *ends), strict=True)
        )
        return {name: float(x) if np.isfinite(x) else None for name, x in values.items()}


Fits = Mapping[str, Mapping[str, Fitted]]
"""Fitted curves by recipe, then axis."""


def unit(largest: float) -> tuple[float, str]:
    """Return the unit for FLOPs up to `largest`: its size in FLOPs, and its name."""
    return next((size, name) for size, name in PREFIXES if largest >= size or size == 1.0)


def flops_words(flops: float) -> str:
    """Return FLOPs as text: `1.23 TFLOPs`."""
    size, name = unit(flops)
    return f"{flops / size:.3g} {name}"


def amount(axis: str, value: float) -> str:
    """Return an amount on an axis as text: `450 GFLOPs charged`, `1,200 rollouts`."""
    return f"{flops_words(value)} {axis}" if axis in COMPARED else f"{value:,.0f} {axis}"


def axis_unit(axis: str, largest: float) -> tuple[float, str]:
    """Return the size and the name of the unit for values up to `largest` on one of AXES; size 1 if
    the axis is not compute."""
    return unit(largest) if axis in COMPARED else (1.0, axis)


def axis_words(axis: str, name: str) -> str:
    """Return the title of one of AXES; `name` is the name of the unit of compute."""
    return f"{axis} compute, {name}" if axis in COMPARED else axis


def monotone(flops: Floats, accuracy: Floats) -> list[Monotone]:
    """Fit a curve to each row of `accuracy` [rows, points] at the compute `flops` [points], in any
    order. Accuracies at the same compute are merged into their mean, weighted by their number."""
    order = np.argsort(flops, kind="stable")
    places, starts, counts = np.unique(flops[order], return_index=True, return_counts=True)
    means = np.add.reduceat(accuracy[:, order], starts, axis=1) / counts
    fits = (optimize.isotonic_regression(row, weights=counts) for row in means)
    return [Monotone(places, fit.x) for fit in fits]


def comparable(curve: pl.DataFrame) -> pl.DataFrame:
    """Return the points of a CURVE at which policies can be compared: the ends of branches, and the
    start and end of the run. Elsewhere the learning rate has not decayed. For a run without
    branches, return all points."""
    is_branch = pl.col("branch").is_not_null()
    if not curve["branch"].is_not_null().any():
        return curve
    place = pl.int_range(pl.len())
    return curve.filter(is_branch | (place == 0) | (place == pl.len() - 1))


def fit_curve(
    points: Sequence[pl.DataFrame], axis: str, num_bootstrap: int, rng: np.random.Generator
) -> Fitted:
    """Fit the CURVE tables of a recipe's seeds over one of AXES.

    A non-decreasing fit keeps upward noise. So the draws of a curve that has levelled off are above
    the curve on average, and tend to reach an accuracy too early."""
    z = stats.norm.ppf(0.5 + CONFIDENCE / 2)
    flops = [part[AXES[axis]].to_numpy().astype(np.float64) for part in points]
    seen = [part["accuracy"].to_numpy() for part in points]
    fits = [monotone(x, y[None])[0].at(x) for x, y in zip(flops, seen, strict=True)]
    spreads = [
        (part["accuracy_high"] - part["accuracy_low"]).to_numpy() / (2 * z) for part in points
    ]
    draws = []
    # draws of the same seeds have points at the same compute, so they are fitted together
    seeds = np.sort(rng.integers(0, len(points), (num_bootstrap, len(points))), axis=1)
    for sample, count in zip(*np.unique(seeds, axis=0, return_counts=True), strict=True):
        middle, spread, places = (
            np.concatenate([of[seed] for seed in sample]) for of in (fits, spreads, flops)
        )
        drawn = np.clip(rng.normal(middle, spread, (count, len(middle))), 0.0, 1.0)
        draws += monotone(places, drawn)
    (curve,) = monotone(np.concatenate(flops), np.concatenate(seen)[None])
    return Fitted(curve, draws)
