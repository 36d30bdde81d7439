"""The frontier of a recipe in an account: what a run cost in it, which settings of a search stand
on it, and the compute at which it reaches an accuracy.

Legend: D draws, P points."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tasks.benchmark.results import Line
from tasks.common.ledger import ACCOUNTS

Floats = npt.NDArray[np.float64]

# modelled seconds, also for an update that costs half and twice as much beside generating
UPDATE_FACTORS = {
    "device_seconds": 1.0,
    "device_seconds, updates half": 0.5,
    "device_seconds, updates double": 2.0,
}
LEARNING = ("score", "update")  # parts of modelled seconds that the trainer takes
MEASURES = ("rollouts", *ACCOUNTS, *UPDATE_FACTORS, "cpu_seconds")
EQUAL = ("rollouts", "cpu_seconds")
"""Accounts in which settings are chosen at equal rollouts: rollouts themselves, and CPU seconds,
which depend on the machine and on what else it did."""


def cost_of(line: Line, measure: str, uses: float = 1.0) -> float:
    """What a run cost in one account."""
    if measure == "rollouts":
        return float(line["rollouts"] + line["rollouts_profile"] / uses)
    if measure in UPDATE_FACTORS:
        factor = UPDATE_FACTORS[measure]
        parts = (line["device_seconds"], line["device_seconds_profile"])
        own, profiled = (
            sum(seconds * (factor if part in LEARNING else 1.0) for part, seconds in each.items())
            for each in parts
        )
        return float(own + profiled / uses)
    if measure == "cpu_seconds":
        return float(line["cpu_seconds"])
    return float(line["flops"][measure] + line["flops_profile"][measure] / uses)


def best_by_budget(trials: Iterable[Line]) -> dict[int, Line]:
    """The trial of each budget that validation likes best, smallest budget first."""
    found: dict[int, Line] = {}
    for trial in trials:
        best = found.get(trial["budget"])
        if best is None or trial["validation"] > best["validation"]:
            found[trial["budget"]] = trial
    return dict(sorted(found.items()))


def chosen(trials: Sequence[Line], measure: str) -> list[Line]:
    """The trials whose settings are run on test for an account: the best of each budget, and those
    between which a straight line on the logarithmic axis of the account's compute leaves no trial
    above it. So a setting that gives up a little accuracy for much less of this compute is run."""
    found = list(best_by_budget(trials).values())
    if measure in EQUAL:
        return found
    places = hull(
        np.log([cost_of(trial, measure) for trial in trials]),
        np.array([trial["validation"] for trial in trials]),
    )
    return found + [trials[place] for place in places if trials[place] not in found]


def hull(x: Floats, y: Floats) -> list[int]:
    """The corners of the rising part of the upper hull of points, from left to right."""
    corners: list[int] = []
    for place in np.lexsort((-y, x)).tolist():
        if corners and y[place] <= y[corners[-1]]:
            continue
        while len(corners) > 1 and is_below(x, y, corners[-2], corners[-1], place):
            corners.pop()
        corners.append(place)
    return corners


def is_below(x: Floats, y: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle point is not above the line through the two others."""
    rise, run = y[last] - y[first], x[last] - x[first]
    return bool((y[middle] - y[first]) * run <= rise * (x[middle] - x[first]))


def reach(cost_P: Floats, accuracy_DP: Floats, target_D: Floats) -> Floats:
    """[D] the compute at which the monotone curve through these points reaches the target, between
    them on a logarithmic axis; infinite where it does not."""
    order = np.argsort(cost_P, kind="stable")
    log_P, best_DP = np.log(cost_P[order]), np.maximum.accumulate(accuracy_DP[:, order], axis=1)
    place_D = (best_DP < target_D[:, None] - 1e-12).sum(axis=1)
    right_D = np.clip(place_D, 1, len(log_P) - 1) if len(log_P) > 1 else np.zeros_like(place_D)
    left_D = np.maximum(right_D - 1, 0)
    rows = np.arange(len(target_D))
    low_D, high_D = best_DP[rows, left_D], best_DP[rows, right_D]
    rise_D = np.where(high_D > low_D, high_D - low_D, 1.0)
    share_D = np.clip((target_D - low_D) / rise_D, 0.0, 1.0)
    between_D = np.exp(log_P[left_D] + share_D * (log_P[right_D] - log_P[left_D]))
    found_D = np.where(place_D == 0, np.exp(log_P[0]), between_D)
    return np.where(place_D == len(log_P), np.inf, found_D)
