"""The page of a comparison in blocks (blocks.py): differences, ratios of compute, and reasons.

A recipe's difference from another is its mean over the blocks, with Student's interval; it includes
seeds, prompts and policies. The ratio of compute is that of the reference, at whose accuracy the
recipe's equals it, over the recipe's: the reference's accuracy is taken as linear in the logarithm
of compute between its runs, and the interval has every ratio at which the difference is not
significant (Fieller)."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from flows.benchmark.results import counts_of
from tests.bench import stopping
from tests.bench.block_lines import CONSTANT, PARTS, START, Run

Floats = npt.NDArray[np.float64]
Line = Mapping[str, Any]
Interval = tuple[float, float, float]  # a value and its 95 % interval; NaN if there is none
Cells = Mapping[tuple[str, str], Mapping[int, Line]]
"""Lines by recipe and length of the run, and then by block."""
COSTS = {
    "charged_paper": "as the paper counts",
    "executed": "executed",
    "charged": "charged",
    "charged_mixed": "charged, mixed groups",
    "rollouts": "rollouts",
    "device_seconds": "7B on an H100",
    "seconds": "measured seconds",
}
MAIN = ("charged_paper", "executed")
"""The accounts of the hypotheses, beside each accuracy."""
NAMES = {START: "initial policy", CONSTANT: "best constant answer"}  # of cells without training
SHARED = 4  # runs that share a profile


def accuracy(line: Line) -> float:
    return float(np.mean(counts_of(line["correct"]))) / int(line["trials"])


def compute(line: Line, account: str, paid: float = 1.0) -> float:
    """Return a cell's cost, with the share `paid` of its profile: FLOPs by account, rollouts,
    modelled seconds (`device_seconds`) or measured ones of generation and updates."""
    if account in line["flops"]:
        own, profile = line["flops"][account], line["flops_profile"][account]
    else:
        own, profile = line[account], line.get(f"{account}_profile", 0.0)
    own = sum(own.get(part, 0.0) for part in PARTS) if account == "seconds" else own
    return float(own + profile * paid)


def interval(values: Floats) -> Interval:
    """Return the mean of independent values, and the ends of Student's interval; NaN for one."""
    mean, half = mean_and_half(values)
    return float(mean), float(mean - half), float(mean + half)


def mean_and_half(values: Floats, level: float = 0.95) -> tuple[Floats, Floats]:
    """Return means over the last axis, and half the width of Student's intervals."""
    num, mean = values.shape[-1], values.mean(-1)
    if num < 2:
        return mean, np.full_like(mean, np.nan)
    half = student.ppf((1 + level) / 2, num - 1) * values.std(-1, ddof=1) / num**0.5
    return mean, np.asarray(half)


def detectable(deviation: float, num: int, power: float = 0.8, level: float = 0.95) -> float:
    """Return the difference that a test over `num` blocks finds with `power`; `deviation` is that
    of a block's difference. (An approximation by Student's quantiles, slightly too large.)"""
    quantiles = student.ppf((1 + level) / 2, num - 1) + student.ppf(power, num - 1)
    return float(quantiles * deviation / num**0.5)


def ratio(
    accuracy_B: Floats, compute_B: Floats, reference_BR: Floats, reference_compute_BR: Floats
) -> Interval:
    """Return the reference's compute over the recipe's at equal accuracy, and the ends of its 95 %
    interval. `reference_BR` are the accuracies of the reference's R runs, by their compute. The
    value is NaN if the accuracies never meet between the reference's runs. An end is 0 or infinity
    if it is outside the range of these runs."""
    grid, at_PB = interpolated(compute_B, reference_BR, reference_compute_BR)
    means, halves = mean_and_half(accuracy_B - at_PB)
    kept = ~(np.abs(means) > halves)  # all of them for one block
    signs = np.sign(means)
    crossed = np.flatnonzero(signs[1:] != signs[:-1])
    middle = float(np.exp(grid[crossed[0]])) if len(crossed) else float("nan")
    inside = np.exp(grid[kept])
    first, last = float(np.exp(grid[0])), float(np.exp(grid[-1]))
    if not len(inside):  # every run of the reference differs significantly
        return (middle, last, float("inf")) if means[-1] > 0 else (middle, 0.0, first)
    low, high = float(inside[0]), float(inside[-1])
    return middle, 0.0 if low == first else low, float("inf") if high == last else high


def interpolated(
    compute_B: Floats, reference_BR: Floats, reference_compute_BR: Floats
) -> tuple[Floats, Floats]:
    """Return logarithms of ratios of compute between the reference's runs, and its accuracies by
    ratio and block there."""
    logs = np.log(reference_compute_BR.mean(0) / compute_B.mean())
    grid = np.linspace(logs[0], logs[-1], 2001)
    return grid, np.array([np.interp(grid, logs, values) for values in reference_BR]).T


def separable(
    accuracy_B: Floats, compute_B: Floats, reference_BR: Floats, reference_compute_BR: Floats
) -> float:
    """Return the ratio of compute that a test over as many blocks finds with a probability of 80 %,
    for these blocks' deviation at equal accuracy and the reference's mean gain."""
    grid, at_PB = interpolated(compute_B, reference_BR, reference_compute_BR)
    differences_PB = accuracy_B - at_PB
    deviation = differences_PB[np.abs(differences_PB.mean(1)).argmin()].std(ddof=1)
    gain = float((at_PB[-1] - at_PB[0]).mean() / (grid[-1] - grid[0]))
    return (
        float(np.exp(detectable(float(deviation), len(accuracy_B)) / gain)) if gain > 0 else np.inf
    )


@dataclass(frozen=True)
class Comparison:
    """The lines of a plan: those of its `reference` by length, shortest first, and `cells`."""

    reference: str
    lengths: Sequence[str]
    cells: Cells

    def blocks(self, recipe: str, length: str) -> list[int]:
        """Return the blocks with this cell and all runs of the reference."""
        ours = [self.cells.get((self.reference, each), {}) for each in self.lengths]
        found = self.cells.get((recipe, length), {})
        return [block for block in sorted(found) if all(block in each for each in ours)]

    def complete(self) -> list[int]:
        """Return the blocks with all runs of the reference."""
        return self.blocks(self.reference, self.lengths[-1])

    def shown(self) -> list[tuple[str, str]]:
        """Return recipe and length of the cells that are in all of these blocks."""
        blocks = self.complete()
        cells = self.cells.items() if blocks else ()
        return [name for name, lines in cells if name[0] not in NAMES and {*blocks} <= {*lines}]

    def ratio(self, recipe: str, length: str, account: str, paid: float = 1.0) -> Interval:
        return ratio(*self.arrays(recipe, length, account, paid))

    def arrays(
        self, recipe: str, length: str, account: str, paid: float = 1.0
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return accuracy and compute by block, and those of the reference by block and run."""
        blocks = self.blocks(recipe, length)
        lines = [self.cells[recipe, length][block] for block in blocks]
        theirs = [
            [self.cells[self.reference, each][block] for each in self.lengths] for block in blocks
        ]
        return (
            np.array([accuracy(line) for line in lines]),
            np.array([compute(line, account, paid) for line in lines]),
            np.array([[accuracy(line) for line in each] for each in theirs]),
            np.array([[compute(line, account) for line in each] for each in theirs]),
        )


def compared(plan: Mapping[str, Any], runs: Sequence[Run], lines: Sequence[Line]) -> Comparison:
    reference, cells = plan["reference"], dict[tuple[str, str], dict[int, Line]]()
    for line in lines:
        cells.setdefault((line["recipe"], line["length"]), {})[line["block"]] = line
    lengths = [run.length for run in runs if reference in run.recipes]
    return Comparison(reference, lengths, cells)


def page(plan: Mapping[str, Any], runs: Sequence[Run], lines: Sequence[Line]) -> str:
    """Return the page of a plan's results."""
    found = compared(plan, runs, lines)
    parts = [
        [f"# {plan['title']}", "", plan.get("about", "")],
        hypotheses(plan, runs, found),
        section("Accuracy and compute", [*accuracies(found), *not_measured(runs, found)]),
        section("Compute to the same accuracy", ratios(found)),
        paper_table(plan, found),
        section("Why", reasons(found)),
        section("A profile that stops early", stopped(plan, runs, found)),
    ]
    return "\n\n".join("\n".join(part).strip() for part in parts if part) + "\n"


def summary(plan: Mapping[str, Any], runs: Sequence[Run], lines: Sequence[Line]) -> list[str]:
    """Return the lines of the README: the hypotheses, and the recipes that are in all blocks."""
    found, rows = compared(plan, runs, lines), []
    blocks, start = found.complete(), found.cells.get((START, ""), {})
    for recipe, length in found.shown():
        cells = found.cells[recipe, length]
        tests = np.array([accuracy(cells[block]) for block in blocks])
        gains = tests - np.array([accuracy(start[block]) for block in blocks])
        factors = [""] * len(MAIN)
        if recipe != found.reference:
            factors = [factor(found.ratio(recipe, length, account)) for account in MAIN]
        row = [f"`{recipe}`", costs_of([*cells.values()])[0], f"{100 * tests.mean():.1f} %"]
        rows.append([*row, points(interval(gains)), *factors])
    header = ["recipe", "rollouts, profile", "test accuracy", "over the start, points"]
    header += [f"`{found.reference}` / recipe, {COSTS[account]}" for account in MAIN]
    return [*hypotheses(plan, runs, found)[2:], "", *table(header, rows)]


def section(title: str, body: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *body] if body else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, none without rows."""
    whole = [header, ["---"] * len(header), *rows] if rows else []
    return ["| " + " | ".join(row) + " |" for row in whole]


def points(values: Interval) -> str:
    mean, low, high = (100 * value for value in values)
    return f"{mean:+.1f}" if np.isnan(low) else f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def factor(values: Interval) -> str:
    """Return a ratio of compute in words."""
    middle, low, high = values
    if low == 0.0 and np.isinf(high):
        bounds = "no bound"
    elif low == 0.0 or np.isinf(high):
        bounds = f"below {high:.2f}" if low == 0.0 else f"above {low:.2f}"
    else:
        bounds = f"{low:.2f} to {high:.2f}"
    return bounds if np.isnan(middle) else f"{middle:.2f} ({bounds})"


def hypotheses(plan: Mapping[str, Any], runs: Sequence[Run], found: Comparison) -> list[str]:
    """Return a sentence for every hypothesis, in their order, and the number of blocks. Those after
    an undecided one are not tested. Before all blocks are complete, none is decided."""
    rows, is_open = list[str](), False
    lengths = {recipe: run.length for run in runs for recipe in run.recipes}
    for num, (recipe, account) in enumerate(plan.get("hypotheses", []), 1):
        blocks = found.blocks(recipe, lengths[recipe])
        if not blocks:
            continue
        of = found.ratio(recipe, lengths[recipe], account)
        _, low, high = of
        if len(blocks) < len(plan["blocks"]):
            verdict = f"not decided: {len(blocks)} of {len(plan['blocks'])} blocks"
        elif is_open:
            verdict = "not tested, since one before it is undecided"
        elif low > 1.0:
            verdict = f"shown: `{recipe}` needs less"
        elif high < 1.0:
            verdict = f"refuted: `{recipe}` needs more"
        else:
            seen = separable(*found.arrays(recipe, lengths[recipe], account))
            verdict = f"not separable; a factor of {seen:.2f} is found with a probability of 80 %"
            if np.isfinite(high):
                verdict += f", and one above {high:.2f} is excluded"
        is_open = is_open or low <= 1.0 <= high
        rows.append(
            f"{num}. Compute of `{found.reference}` / compute of `{recipe}` to the same accuracy, "
            f"{COSTS[account]}: {factor(of)}; {verdict}."
        )
    return section("Hypotheses", rows)


def accuracies(found: Comparison) -> list[str]:
    """Return the table of accuracies and costs."""
    base = found.cells.get((found.reference, found.lengths[-1]), {})
    header = [
        *("recipe", "length", "blocks", "test", "over the start"),
        f"over `{found.reference}`, {found.lengths[-1]}",
        *("rollouts, profile", *(COSTS[account] for account in MAIN)),
    ]
    rows = []
    for (recipe, length), lines in found.cells.items():
        mean = np.mean([accuracy(line) for line in lines.values()])
        row = [NAMES.get(recipe, f"`{recipe}`"), length, str(len(lines))]
        row.append(f"{100 * mean:.1f} %")
        for others in (found.cells.get((START, ""), {}), base):
            both = [block for block in sorted(lines) if block in others and others is not lines]
            own = np.array([accuracy(lines[block]) - accuracy(others[block]) for block in both])
            row.append(points(interval(own)) if both else "")
        rows.append([*row, *(("", "", "") if recipe in NAMES else costs_of([*lines.values()]))])
    return table(header, rows)


def not_measured(runs: Sequence[Run], found: Comparison) -> list[str]:
    """Return the planned cells that are in no block as text."""
    cells = [(recipe, run.length) for run in runs for recipe in run.recipes]
    names = [
        f"`{recipe}` ({length})" for recipe, length in cells if (recipe, length) not in found.cells
    ]
    return ["", f"Planned, not measured: {', '.join(names)}."] if names else []


def costs_of(lines: Sequence[Line]) -> tuple[str, str, str]:
    """Return the means of rollouts and TFLOPs as text."""
    own, profile = (
        np.mean([line[name] for line in lines]) for name in ("rollouts", "rollouts_profile")
    )
    paper, executed = (np.mean([compute(line, name) for line in lines]) / 1e12 for name in MAIN)
    return f"{own:,.0f}, {profile:,.0f}", f"{paper:,.0f} TFLOPs", f"{executed:,.0f} TFLOPs"


def ratios(found: Comparison) -> list[str]:
    """Return the table of compute ratios, for the blocks with all runs of the reference."""
    rows = []
    for (recipe, length), lines in found.cells.items():
        blocks = found.blocks(recipe, length)
        if recipe in (*NAMES, found.reference) or not blocks or len(found.lengths) < 2:
            continue
        reads = any(line["rollouts_profile"] for line in lines.values())
        for runs in (1, SHARED) if reads else (1,):
            name = f"`{recipe}`, {length}" + (f", profile for {runs} runs" if runs > 1 else "")
            accounts = [name for name in COSTS if name in costs_with(lines[blocks[0]])]
            rows.append(
                [name, *(factor(found.ratio(recipe, length, a, 1 / runs)) for a in accounts)]
            )
    return table([f"`{found.reference}` / recipe", *COSTS.values()], rows)


def costs_with(line: Line) -> set[str]:
    return {*line["flops"], *line}


def paper_table(plan: Mapping[str, Any], found: Comparison) -> list[str]:
    """Return a table like the paper's: compute of profile and training in its account, and
    accuracy; beside it the paper's own numbers."""
    paper = plan.get("paper")
    if not paper:
        return []
    rows = []
    for recipe, theirs in paper["rows"].items():
        length = found.lengths[-1] if recipe == found.reference else paper["length"]
        lines = [*found.cells.get((recipe, length), {}).values()]
        if not lines:
            continue
        own, profile = (
            np.mean([line[name]["charged_paper"] for line in lines]) / 1e15
            for name in ("flops", "flops_profile")
        )
        value = interval(np.array([accuracy(line) for line in lines]))
        mean, low, high = (100 * each for each in value)
        within = "" if np.isnan(low) else f" ({low:.1f} to {high:.1f})"
        rows.append(
            [f"`{recipe}`", f"{profile:.2f} + {own:.2f} PFLOPs", f"{mean:.1f} %{within}", *theirs]
        )
    header = ["recipe", "profile + training", "avg@4", *paper["columns"]]
    of = table(header, rows)
    return section("As the paper reads", [paper["about"].strip(), "", *of] if of else [])


def reasons(found: Comparison) -> list[str]:
    """Return the table of mixed groups over training, and of the drift from the profile in the last
    quarter of the steps."""
    rows = []
    for (recipe, length), each in found.cells.items():
        if recipe in NAMES or not all("drift" in line for line in each.values()):
            continue
        lines = [*each.values()]
        quarters = np.mean([line["mixed"] for line in lines], axis=0)
        last = [line["drift"][-1] for line in lines]
        drift, gap, chance = (
            100 * np.mean([row[name] for row in last]) for name in ("drift", "gap", "chance")
        )
        share = np.mean([line["rollouts_mixed"] / line["rollouts"] for line in lines])
        quarter_words = ", ".join(f"{100 * value:.0f}" for value in quarters)
        rows.append(
            [f"`{recipe}`", length, quarter_words, f"{share:.0%}", f"{drift:+.1f}"]
            + [f"{gap:.1f} ({chance:.1f} by chance)"]
        )
    header = ["recipe", "length", "mixed groups by quarter, %", "rollouts in mixed groups"]
    return table([*header, "drift at the end, points", "gap at the end, points"], rows)


def stopped(plan: Mapping[str, Any], runs: Sequence[Run], found: Comparison) -> list[str]:
    """Return a table of what `profile.stop` would have changed for the recipe of the first
    hypothesis, from the profile's samples and exactly over their orders. Accuracies are those of
    the plan from all samples, and a profile's cost is in proportion to its samples."""
    tested = plan.get("hypotheses") or [("", "")]
    recipe, accounts = tested[0][0], [account for name, account in tested if name == tested[0][0]]
    length = next((run.length for run in runs if recipe in run.recipes), "")
    counts = [
        counts_of(found.cells[START, ""][block]["profile"])
        for block in found.blocks(recipe, length)
        if "profile" in found.cells[START, ""][block]
    ]
    if not counts:
        return []
    lines = []
    for blocks in zip(*(stopping.rows("", each) for each in counts), strict=True):
        rule = str(blocks[0]["rule"])
        parts = ("samples", "agree", "lost")
        samples, agree, lost = (float(np.mean([row[part] for row in blocks])) for part in parts)
        if not rule.startswith("fixed") or samples == stopping.SAMPLES:
            paid = samples / stopping.SAMPLES
            factors = (factor(found.ratio(recipe, length, account, paid)) for account in accounts)
            lines.append([f"`{rule}`", f"{samples:.2f}", f"{agree:.1%}", f"{lost:.1%}", *factors])
    equal = np.mean([np.isin(each, (0, stopping.SAMPLES)).mean() for each in counts])
    header = ["rule", "samples a prompt", "same decision", "learnable prompts lost"]
    header += [f"`{found.reference}` / `{recipe}`, {COSTS[account]}" for account in accounts]
    about = (
        "Computed from the samples of the profiles; accuracies are those of the plan from all "
        f"samples. {equal:.0%} of the prompts have equal rewards: refreshing by scoring would "
        "sample these again."
    )
    return [*textwrap.wrap(about, 128), "", *table(header, lines)]
