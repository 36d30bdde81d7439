"""The results as a page: the headline, the points behind it, and the chosen settings."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.benchmark.figures import write_figure
from flows.benchmark.frontier import MEASURES
from flows.benchmark.headline import (
    Ratio,
    Runs,
    all_runs,
    ratios,
    runs_of,
    spread_of,
    target_budgets,
    update_cost,
)
from flows.benchmark.protocol import Protocol, Values
from flows.benchmark.results import Line, read_facts, read_lines
from flows.benchmark.runner import due
from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.files import replace_file

SHOWN = [name for name in MEASURES if name != "charged_paper"]
USES = 4  # runs that share a profile, in the rows of amortised profiling


def write_tables(protocol: Protocol, values: Values, file: Path) -> None:
    """Write the page beside its results file, and a figure for each family."""
    lines = due(protocol, values, read_lines(file))
    for family in protocol.families:
        if runs := all_runs(protocol, family, lines):
            write_figure(file.with_name(f"{file.stem}-{family}.svg"), runs)
    text = "\n".join(page(protocol, lines, file)) + "\n"
    replace_file(file.with_suffix(".md"), lambda stream: stream.write(text.encode()))


def page(protocol: Protocol, lines: list[Line], file: Path) -> Iterator[str]:
    facts, failed = read_facts(file), [line for line in lines if "failed" in line]
    machines = sorted({line["machine"] for line in lines})
    keys = ("seconds", "cpu_seconds")  # a failed cell has no `cpu_seconds`
    wall, cpu = (sum(line.get(key, 0.0) for line in lines) / 3600 for key in keys)
    yield f"# {protocol.title}\n"
    yield (
        f"Made from the results of `{file.stem}.yaml` by `winnow bench`: {len(lines)} cells, "
        f"{len(failed)} of them failed, {wall:.1f} hours of run time ({cpu:.1f} of CPU time); "
        f"{'; '.join(machines) or 'nothing has run yet'}. "
        "How to read it: [the guide](../guide/benchmark.md)."
    )
    yield from superseded_words(lines)
    for family in protocol.families:
        runs = all_runs(protocol, family, lines)
        yield from ("", f"## {family}", "")
        if family in facts:
            yield from (facts_words(facts[family]), "")
        reference = runs_of(protocol, family, protocol.reference, lines)
        if reference is not None:
            yield from (f"![{family}: accuracy against compute]({file.stem}-{family}.svg)", "")
            yield from headline(runs, reference, protocol)
            yield from points(runs)
        else:
            names = " and ".join(f"`{name}`" for name in protocol.reference)
            yield f"No result on test yet of the reference, {names}."
        yield from tuned([line for line in lines if line["family"] == family])
    if failed:
        yield from ("", "## Failed", "")
        yield from (
            f"- {line['family']} `{line['recipe']}` at {line['budget']}, seed {line['seed']}: "
            f"{line['failed']}"
            for line in failed
        )


def superseded_words(lines: list[Line]) -> Iterator[str]:
    """Yield lines with the reasons why results on the page are superseded, if any are."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if "superseded" in line:
            reasons.setdefault(line["superseded"], []).append(line["recipe"])
    if not reasons:
        return
    every = "all" if all("superseded" in line for line in lines) else "some"
    yield f"\n**These results are superseded**, {every} of them.\n"
    for reason, recipes in sorted(reasons.items()):
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(recipes))
        yield f"- {names}: {reason}"


def caveats(runs: Mapping[str, Runs], reference: Runs) -> Iterator[str]:
    others = [mine for mine in runs.values() if not mine.is_all_of(reference)]
    if len(reference.best) == 1 and any(
        mine.best.keys() == reference.best.keys() for mine in others
    ):
        yield (
            "There is one budget. A recipe that is as good as the reference misses its accuracy "
            "there in half of all cases: `at least` and `not reached` do not tell the two apart."
        )
    if spread_of(list(runs.values())) is None:
        yield "There was one search: the intervals leave out the noise of the search."
    if any(mine.is_equal for mine in (*runs.values(), reference)):
        yield (
            "Settings were chosen by accuracy at equal rollouts, not on each account's own "
            "frontier, where those of that frontier have not been run on test."
        )


def facts_words(facts: Mapping[str, Any]) -> str:
    """Return a family's initial pass rates and the modelled saving of an oracle, as text."""
    savings = " and ".join(f"{value:.1f} in `{name}`" for name, value in facts["oracle"].items())
    return (
        f"{facts['prompts']:,} training prompts, {facts['never']:.0%} never solved and "
        f"{facts['always']:.0%} always in {facts['num_samples']} samples, mean pass rate "
        f"{facts['pass_rate']:.2f}; {facts['prompt_tokens']:.0f} tokens a prompt, "
        f"{facts['completion_tokens']:.0f} a completion. By a model of variance, compute of groups "
        f"of eight / compute of an oracle of pass rates, to the same information, is {savings}."
    )


def headline(runs: dict[str, Runs], reference: Runs, protocol: Protocol) -> Iterator[str]:
    """Yield a table of ratios for each target accuracy of the reference, and the caveats."""
    others = [mine for mine in runs.values() if not mine.is_all_of(reference)]
    if not others:
        return
    spread = spread_of(list(runs.values()))
    rows: list[tuple[str, dict[str, dict[int, Ratio]]]] = []
    for mine in others:
        for uses in (1, USES) if mine.reads_profile() else (1,):
            shared = f", profile shared by {uses} runs" if uses > 1 else ""
            rows.append((f"{mine.name}{shared}", ratios(mine, reference, SHOWN, spread, uses)))
    names = " and ".join(f"`{name}`" for name in protocol.reference)
    compared = f"the better of {names}" if len(protocol.reference) > 1 else names
    yield (
        f"**Compute of {compared} / compute of the recipe, to the same accuracy** (above 1: the "
        "recipe is cheaper), with its 95 % interval; bold where that excludes 1.\n"
    )
    # recipes of the reference are never run beyond its largest budget
    contestants = [mine for name, mine in runs.items() if name not in protocol.reference]
    for budget in target_budgets(reference, contestants or others):
        target = reference.points[reference.best[budget]]
        yield (
            f"To {sum(target.tests) / len(target.tests):.1%}, the accuracy of "
            f"`{target.lines[0]['recipe']}` at {budget:,} rollouts:\n"
        )
        yield f"| recipe | {' | '.join(SHOWN)} |"
        yield "|---" * (len(SHOWN) + 1) + "|"
        for words, by_measure in rows:
            cells = [ratio_words(by_measure[measure][budget]) for measure in SHOWN]
            yield f"| {words} | {' | '.join(cells)} |"
        yield ""
    for words in caveats(runs, reference):
        yield from (words, "")
    plain = runs.get(protocol.reference[0])
    if plain is not None and (cost := update_cost(plain)) is not None:
        yield (
            f"In `device_seconds` updating a rollout of {plain.name} costs {cost:.2f} of "
            "generating it; 3 in FLOPs.\n"
        )


def tuned(lines: list[Line]) -> Iterator[str]:
    """Yield a table of the best trial on validation for each recipe, search and budget."""
    tried: dict[tuple[str, int, int], list[Line]] = {}
    for line in lines:
        if line["measures"] == "validation" and "failed" not in line:
            tried.setdefault((line["recipe"], line["seed"], line["budget"]), []).append(line)
    if not tried:
        return
    yield "\n| tuned on validation | search | budget | settings tried | lowest | best | with |"
    yield "|---|---|---|---|---|---|---|"
    for (recipe, search, budget), trials in tried.items():
        best = max(trials, key=lambda line: float(line["validation"]))
        lowest = min(float(line["validation"]) for line in trials)
        yield (
            f"| `{recipe}` | {search} | {budget:,} | {len(trials)} | {lowest:.1%} | "
            f"{best['validation']:.1%} | {settings_words(best)} |"
        )


def settings_words(line: Line) -> str:
    changed = ", ".join(f"{key} {value}" for key, value in line["settings"].items())
    return changed or "as in params.yaml"


def ratio_words(ratio: Ratio) -> str:
    """Return as text a ratio with its interval, bold where that excludes 1 as printed; `not
    reached` is a ratio of 0."""
    value, low = (
        "not reached" if end is None else f"{end:.2f}" for end in (ratio.value, ratio.low)
    )
    interval, high = f"{low} to {ratio.most:.2f} or more", math.inf
    if ratio.is_bound:
        value, interval = f"at least {value}", f"{low} or more"
    elif ratio.high is not None:
        interval, high = f"{low} to {ratio.high:.2f}", ratio.high
    is_apart = round(ratio.low or 0.0, 2) > 1 or round(high, 2) < 1
    return f"{f'**{value}**' if is_apart else value} ({interval})"


def amount_words(measure: str, amount: float) -> str:
    """Return an amount as text: FLOPs in TFLOPs, rollouts and seconds as whole numbers."""
    return f"{amount / 1e12:.3f} T" if measure in ACCOUNTS else f"{amount:,.0f}"


def points(runs: dict[str, Runs]) -> Iterator[str]:
    """Yield a table of all points run on test, on a frontier or not, with their settings."""
    yield f"| recipe | budget | seeds | test | spread | {' | '.join(SHOWN)} | settings | code |"
    yield "|---" * (len(SHOWN) + 7) + "|"
    for mine in runs.values():
        for point in mine.points:
            tests, lines = point.tests, point.lines
            cells = [amount_words(measure, point.cost(measure)) for measure in SHOWN]
            yield (
                f"| {mine.name} | {point.budget:,} | {len(lines)} | "
                f"{sum(tests) / len(tests):.1%} | "
                f"{min(tests):.1%} to {max(tests):.1%} | {' | '.join(cells)} | "
                f"{settings_words(lines[0])} | "
                f"{', '.join(sorted({line['code'][:6] for line in lines}))} |"
            )
