"""The costs of a run, and the training that its budget buys, as text."""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from flows.cli import flags
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.recipes import recipe as recipe_of

COUNTS = ("rollouts", "steps", "passes", "FLOPs", "validation")
UNITS = {"d": 24.0, "h": 1.0, "min": 1 / 60, "s": 1 / 3600}  # in hours


def add_price(parser: argparse.ArgumentParser) -> None:
    text = "also print the cost at this price"
    parser.add_argument("--price", type=money, metavar="PER_GPU_HOUR", help=text)


def add_look(parser: argparse.ArgumentParser) -> None:
    text = "sample this many prompts, and print for which recipes the profile is expected to pay"
    parser.add_argument("--look", type=flags.count(2), metavar="PROMPTS", help=text)


def look(options: argparse.Namespace, values: Mapping[str, Any], layout: Layout) -> str:
    """Return what a first look shows, or an empty string without `--look`."""
    if options.look is None:
        return ""
    from flows.doctor.look import look as sampled  # takes seconds

    return sampled(values, layout, options.look)


def money(text: str) -> float:
    """Parse a finite price of at least 0. Otherwise raise ValueError, which argparse reports."""
    if not 0 <= (price := float(text)) < float("inf"):
        raise ValueError(text)
    return price


def bought(
    values: Mapping[str, Any], layout: Layout, recipes: Sequence[str], price: float | None
) -> str:
    """Return a table of what `experiment.budget` buys per recipe, and the smallest difference that
    the test prompts resolve. `price` is per GPU-hour. Raise ParamsError if there are `refusals`."""
    from flows.doctor import forecast  # takes two seconds

    if refused := forecast.refusals(values, layout, recipes, certain=False):
        raise ParamsError("\n".join(refused))
    rows, notes = [], []
    for recipe, fits in forecast.fits(values, layout, recipes).items():
        row = {name: interval(fits[name], short) for name in COUNTS}
        row |= {"time": interval(fits["hours"])}
        if fits["GPU-hours"].high:
            row |= {"GPU time": interval(fits["GPU-hours"])}
            money = fits["GPU-hours"] * (price or 0.0)
            row |= {} if price is None else {"money": interval(money, "{:,.2f}".format)}
        rows.append({"recipe": recipe, **row})
        validation, others = fits["validation"].middle, fits["FLOPs"].middle
        if validation > others - validation:
            notes.append(
                f"note: recipe '{recipe}': validation takes {short(validation)} of {short(others)} "
                "FLOPs, more than all else: raise train.validation.every_share, or lower "
                "train.validation.num_samples or ingest.splits.validation"
            )
        own, passes = recipe_of(values, recipe), fits["passes"].middle
        allocate, control = own["allocate"], own["train"].get("control", {}).get("method", "plan")
        size = allocate.get("group_size", 0)
        if control == "plan" and allocate["strategy"] == "uniform" and size <= 8 and passes >= 4:
            notes.append(
                f"note: recipe '{recipe}' makes {passes:.0f} passes with groups of {size}: with "
                "more compute, larger groups usually pay before more passes (IsoCompute, arXiv "
                f"2603.12151): try allocate.group_size {2 * size}, with {passes / 2:.0f} passes"
            )
    if price is not None and not any("money" in row for row in rows):
        notes.append("note: there is no GPU here, so --price has no GPU-hours to count")
    if rows:
        amount, account = (values["experiment"]["budget"][name] for name in ("amount", "account"))
        first = f"per cell, a budget of {short(amount)} {account} buys, expected (at least to at"
        notes.insert(0, f"{first} most):\n{table(rows)}")
    notes.append(importlib.import_module("tasks.allocate.budget").resolution(values, layout))
    return "\n".join(filter(None, notes))


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table with right-aligned columns; `recipe`, `stage` and `why` are left-aligned."""
    sides = ["left" if name in ("recipe", "stage", "why") else "right" for name in rows[0]]
    return str(tabulate(rows, "keys", "plain", disable_numparse=True, colalign=sides))


def interval(value: Any, form: Callable[[float], str] | None = None) -> str:
    """Return a Range as `4.1M (2.0M to 8.2M)`, or `4.1M` if exact; `form` defaults to `clock`."""
    low, middle, high = map(form or clock, (value.low, value.middle, value.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def clock(hours: float) -> str:
    """Return a duration in the largest unit of which it has at least one: `2.5 h`."""
    unit, size = next((pair for pair in UNITS.items() if hours >= pair[1]), ("s", 1 / 3600))
    number = hours / size
    text = f"{number:,.1f}".removesuffix(".0") if number < 9.95 else f"{number:,.0f}"
    return f"{text} {unit}"


def short(number: float) -> str:
    """Return 3 significant digits with an SI prefix from k to P; 1e18 and above as `1.2e+18`."""
    number = float(f"{number:.3g}")  # rounded first, because rounding can reach the next unit
    for limit, unit in ((1e18, ""), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number:.1e}" if not unit else f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"
