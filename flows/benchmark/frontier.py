"""The frontier of a recipe in an account: the cost of a run, and the trials whose settings are run
on test."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from flows.benchmark.results import Line
from tasks.common.accounting.ledger import ACCOUNTS

Floats = npt.NDArray[np.float64]

# modelled seconds, also with updates at half and at twice the cost relative to generation
UPDATE_FACTORS = {
    "device_seconds": 1.0,
    "device_seconds, updates half": 0.5,
    "device_seconds, updates double": 2.0,
}
LEARNING = ("score", "update")  # the trainer's parts of modelled seconds
MEASURES = ("rollouts", *ACCOUNTS, *UPDATE_FACTORS)


def cost_of(line: Line, measure: str, uses: float = 1.0) -> float:
    """Return a run's cost in `measure`, plus 1 / `uses` of the profile's cost."""
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
    return float(line["flops"][measure] + line["flops_profile"][measure] / uses)


def best_by_budget(trials: Iterable[Line]) -> dict[int, Line]:
    """Return each budget's trial with the best validation accuracy, smallest budget first."""
    found: dict[int, Line] = {}
    for trial in trials:
        best = found.get(trial["budget"])
        if best is None or trial["validation"] > best["validation"]:
            found[trial["budget"]] = trial
    return dict(sorted(found.items()))


def selected_trials(trials: Sequence[Line], measure: str) -> list[Line]:
    """Return the trials whose settings are run on test for the account `measure`: the best of each
    budget and, unless `measure` is `rollouts`, those on the upper convex hull of accuracy against
    log compute. So settings with slightly less accuracy for much less compute are also run."""
    best = list(best_by_budget(trials).values())
    if measure == "rollouts":
        return best
    places = hull(
        np.log([cost_of(trial, measure) for trial in trials]),
        np.array([trial["validation"] for trial in trials]),
    )
    return best + [trials[place] for place in places if trials[place] not in best]


def hull(x: Floats, y: Floats) -> list[int]:
    """Return the indices of the corners of the upper convex hull's rising part, by ascending x."""
    corners: list[int] = []
    for place in np.lexsort((-y, x)).tolist():
        if corners and y[place] <= y[corners[-1]]:
            continue
        while len(corners) > 1 and is_below(x, y, corners[-2], corners[-1], place):
            corners.pop()
        corners.append(place)
    return corners


def is_below(x: Floats, y: Floats, first: int, middle: int, last: int) -> bool:
    """Return whether the middle point is on or below the line from the first to the last."""
    rise, run = y[last] - y[first], x[last] - x[first]
    return bool((y[middle] - y[first]) * run <= rise * (x[middle] - x[first]))
