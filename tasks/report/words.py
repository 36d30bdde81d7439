"""The verdict in words. It states what was measured, also if the first recipe loses or no
difference can be shown."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.report.charts import unit
from tasks.report.curves import COMPARED
from tasks.report.paired import Difference, is_apart

MAX_NAMED = 5  # recipes in the verdict


def verdict(summary: Mapping[str, Any]) -> str:
    """Return one paragraph: what each recipe reached with which compute, compared with the
    reference."""
    initial = summary["initial"]
    recipes = summary["recipes"]
    reference = summary["reference"]
    ranked = sorted(recipes, key=lambda name: -recipes[name]["pass_at_1"]["mean"])
    start = (
        f"The initial policy solves {initial['pass_at_1']:.1%} of {initial['num_prompts']} test "
        "prompts (pass@1)."
    )
    sentences = [start, *(reached(name, recipes[name]) for name in ranked[:MAX_NAMED])]
    others = [name for name in ranked if name != reference][:MAX_NAMED]
    for name in others:
        sentences.append(
            compared(name, recipes[name], reference, recipes[reference])
            + matched(recipes[name], reference, summary["target"])
        )
    if others:
        resampled = recipes[others[0]]["differences"]["reference"]["over"]
        sentences.append(
            "Differences are paired over the test prompts; their 95 % intervals are over "
            f"{resampled}."
        )
    if len(ranked) > MAX_NAMED:
        sentences.append(f"{len(ranked) - MAX_NAMED} more recipes are in the table.")
    sentences.append(caveat(recipes))
    return " ".join(sentences)


def reached(name: str, summary: Mapping[str, Any]) -> str:
    """Return the accuracy with its interval, and the whole bill."""
    profiled = ", profiling included" if summary["reads_profile"] else ""
    seeds = "" if summary["num_seeds"] == 1 else f", mean of {summary['num_seeds']} seeds"
    apart = is_apart(summary["differences"]["initial"])
    unclear = "" if apart else ", not told apart from the initial policy"
    return (
        f"{name} reaches {summary['pass_at_1']['mean']:.1%} ({interval(summary)}{seeds}{unclear}) "
        f"for {costs(totals(summary))}{profiled}."
    )


def interval(summary: Mapping[str, Any]) -> str:
    """Return the interval of pass@1 in words."""
    return f"95 % interval {summary['pass_at_1_low']:.1%} to {summary['pass_at_1_high']:.1%}"


def compared(name: str, mine: Mapping[str, Any], reference: str, other: Mapping[str, Any]) -> str:
    """Return `name` against the reference: the paired difference, whether it is shown, compute."""
    found = mine["differences"]["reference"]
    points = 100 * found["mean"]
    if not is_apart(found):
        direction = (
            "level with" if abs(points) < 0.05 else f"{abs(points):.1f} points {side(points)}"
        )
        result = (
            f"{name} is {direction} {reference}, but the interval of the difference "
            f"({points_words(found)}) holds 0: this run does not tell them apart"
        )
    else:
        verb = "beats" if points > 0 else "loses to"
        result = f"{name} {verb} {reference} by {abs(points):.1f} points ({points_words(found)})"
    return f"{result}; {cost_words(name, mine, other)}."


def points_words(found: Difference) -> str:
    """Return the interval of a difference in points."""
    return f"{100 * found['low']:+.1f} to {100 * found['high']:+.1f}"


def side(points: float) -> str:
    """Return whether a difference is above or below."""
    return "above" if points > 0 else "below"


def cost_words(name: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how the two bills compare in each account."""
    ratios = {
        account: ratio(mine[f"flops_{account}"]["mean"], other[f"flops_{account}"]["mean"])
        for account in COMPARED
    }
    words = listed([f"{compared} {account}" for account, compared in ratios.items()])
    return f"it takes {words} compute"


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return f"{', '.join(words[:-1])} and {words[-1]}"


def costs(flops: Mapping[str, float]) -> str:
    """Return compute by account in one unit: `4.6 TFLOPs charged and 1.75 executed`."""
    size, name = unit(max(flops.values()))
    words = [f"{value / size:.3g}" for value in flops.values()]
    words[0] += f" {name}"
    return listed([f"{number} {account}" for number, account in zip(words, flops, strict=True)])


def totals(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the whole bill of a recipe in each account, the mean over its seeds."""
    return {account: summary[f"flops_{account}"]["mean"] for account in COMPARED}


def ratio(mine: float, other: float) -> str:
    """Return a comparison: `2.5 times less`, `1.2 times more`, `as much`."""
    if not mine or not other or 0.98 < mine / other < 1.02:
        return "as much"
    if mine < other:
        return f"{other / mine:.1f} times less"
    return f"{mine / other:.1f} times more"


def matched(mine: Mapping[str, Any], reference: str, target: float) -> str:
    """Return when a recipe's fitted validation curve reached the accuracy that the reference ends
    with."""
    needed = {name: found["flops"] for name, found in mine["compute_to_reference"].items()}
    accuracy = f"the {target:.1%} that {reference} ends with"
    if None in needed.values():
        return f" On validation its fitted curve never reaches {accuracy}."
    return f" On validation its fitted curve reaches {accuracy} after {costs(needed)}."


def stale_words(name: str, drift: Mapping[str, Any], *, reads_profile: bool) -> str:
    """Return what a stale profile of the run `name` means. If the net drift is small, the gap is
    named instead."""
    if 2 * abs(drift["drift"]) >= drift["gap"]:
        how = (
            f"{100 * abs(drift['drift']):.0f} points {'more' if drift['drift'] > 0 else 'less'} "
            "often than profiled"
        )
    else:
        how = (
            f"{100 * drift['gap']:.0f} points away from what was profiled, some more and some less "
            "often"
        )
    second = (
        "a second round (python -m flows.pipeline --rounds 2) would re-size groups"
        if reads_profile
        else "this recipe does not read it, but one that does would now size its groups wrongly"
    )
    return f"{name}: in the last pass prompts were solved {how}: the profile is stale; {second}"


def caveat(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what can be concluded from the number of seeds."""
    seeds = min(summary["num_seeds"] for summary in recipes.values())
    if seeds == 1:
        return "With one seed, how much a repetition would differ is unknown."
    spread = max(
        summary["pass_at_1"]["max"] - summary["pass_at_1"]["min"] for summary in recipes.values()
    )
    return (
        f"Between the {seeds} seeds of one recipe, pass@1 differs by up to {100 * spread:.1f} "
        "points."
    )
