"""The results as a page: the headline, the points behind it, and the settings that were chosen; and
as the short table of the README."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.benchmark.figures import write_figure
from tasks.benchmark.headline import (
    MEASURES,
    Ratio,
    Runs,
    ratios,
    resample,
    runs_of,
    update_cost,
)
from tasks.benchmark.protocol import Protocol, Values
from tasks.benchmark.results import Line, read_facts, read_results
from tasks.benchmark.runner import due
from tasks.common.files import ArtifactError, replace_file
from tasks.common.ledger import ACCOUNTS

SHOWN = [name for name in MEASURES if name != "charged_paper"]
SHORT = ["rollouts", "charged", "charged_mixed", "executed", "device_seconds"]
USES = 4  # runs that share a profile, in the table of amortised profiling
BEGIN, END = "<!-- benchmark: begin -->\n", "<!-- benchmark: end -->\n"


def write_tables(protocol: Protocol, values: Values, file: Path) -> None:
    """Write the page of a results file beside it, and a figure for each family."""
    lines = due(protocol, values, read_results(file))
    figures = {}
    for family in protocol.families:
        runs = runs_of(protocol, family, lines)
        if runs:
            figures[family] = file.with_name(f"{file.stem}-{family}.svg")
            write_figure(figures[family], runs)
    facts = read_facts(file)
    text = "\n".join(page(protocol, lines, facts, file.name, figures)) + "\n"
    replace_file(file.with_suffix(".md"), lambda stream: stream.write(text.encode()))


def split_readme(readme: Path) -> tuple[str, str]:
    """What stands before and after the short table. Raises ArtifactError without its marks."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArtifactError(f"{readme} has no lines {BEGIN.strip()} and {END.strip()}: add them")
    return before, after


def write_readme(protocol: Protocol, values: Values, file: Path, readme: Path) -> None:
    """Put the short table between its marks in `readme`."""
    before, after = split_readme(readme)
    lines = due(protocol, values, read_results(file))
    table = "\n".join(short(protocol, lines)) + "\n"
    new = f"{before}{BEGIN}{table}{END}{after}".encode()
    replace_file(readme, lambda stream: stream.write(new))


def page(
    protocol: Protocol,
    lines: list[Line],
    facts: Mapping[str, Any],
    source: str,
    figures: Mapping[str, Path],
) -> Iterator[str]:
    """The page, line by line."""
    failed = [line for line in lines if "failed" in line]
    machines = sorted({line["machine"] for line in lines})
    seconds = sum(line["seconds"] for line in lines)
    yield f"# {protocol.title}"
    yield ""
    yield (
        f"Made from `{source}` by `python -m flows.benchmark`: {len(lines)} cells, "
        f"{len(failed)} of them failed, {seconds / 3600:.1f} hours of one core; "
        f"{'; '.join(machines) or 'nothing has run yet'}. "
        "[The guide](../guide/benchmark.md) says how to read it."
    )
    for family in protocol.families:
        runs = runs_of(protocol, family, lines)
        yield from ("", f"## {family}", "")
        if family in facts:
            yield from (facts_words(facts[family]), "")
        if protocol.reference in runs:
            if family in figures:
                yield from (f"![{family}: accuracy against compute]({figures[family].name})", "")
            if len(runs) > 1:
                yield from headline(runs, protocol)
            yield from points(runs)
        else:
            yield f"`{protocol.reference}` has not been run on test yet."
        yield from tuned([line for line in lines if line["family"] == family])
    if failed:
        yield from ("", "## Failed", "")
        yield from (
            f"- {line['family']} `{line['recipe']}` at {line['budget']}, seed {line['seed']}: "
            f"{line['failed']}"
            for line in failed
        )


def facts_words(facts: Mapping[str, Any]) -> str:
    """What the initial policy makes of a family, and the ceiling that follows."""
    ceilings = " and ".join(f"{value:.1f} in `{name}`" for name, value in facts["ceiling"].items())
    return (
        f"{facts['prompts']:,} training prompts, {facts['never']:.0%} never solved and "
        f"{facts['always']:.0%} always in {facts['num_samples']} samples, mean pass rate "
        f"{facts['pass_rate']:.2f}; {facts['prompt_tokens']:.0f} tokens a prompt, "
        f"{facts['completion_tokens']:.0f} a completion. Were pass rates known, the quarter of the "
        f"prompts that is worth most, updated on the cheaper side, would need {ceilings} times "
        "less compute than groups of eight for the same information."
    )


def headline(runs: dict[str, Runs], protocol: Protocol) -> Iterator[str]:
    """Ratios at each accuracy of the reference."""
    reference = runs[protocol.reference]
    others = [mine for name, mine in runs.items() if name != protocol.reference]
    draws = {mine.recipe: resample(mine, reference, protocol.num_bootstrap) for mine in others}
    rows: list[tuple[str, dict[str, dict[int, Ratio]]]] = []
    for mine in others:
        for uses in (1, USES) if mine.reads_profile() else (1,):
            shared = f", profile shared by {uses} runs" if uses > 1 else ""
            found = {
                measure: ratios(mine, reference, measure, draws[mine.recipe], uses)
                for measure in SHOWN
            }
            rows.append((f"`{mine.recipe}`{shared}", found))
    for budget, rates in zip(reference.by_budget, reference.rates(), strict=True):
        yield (
            f"Times less compute than `{protocol.reference}` to its accuracy at {budget:,} "
            f"rollouts, {rates.mean():.1%} (95 % interval over seeds and prompts):"
        )
        yield ""
        yield f"| recipe | {' | '.join(SHOWN)} |"
        yield "|---" * (len(SHOWN) + 1) + "|"
        for words, found in rows:
            cells = [ratio_words(found[measure][budget]) for measure in SHOWN]
            yield f"| {words} | {' | '.join(cells)} |"
        yield ""
    yield (
        f"In `device_seconds` updating a rollout of `{protocol.reference}` costs "
        f"{update_cost(reference):.2f} of generating it; 3 in FLOPs."
    )
    yield ""


def short(protocol: Protocol, lines: list[Line]) -> Iterator[str]:
    """What the README shows: at the reference's best accuracy, every family and recipe that has
    been run at all its budgets."""
    yield f"| family | recipe | {' | '.join(SHORT)} |"
    yield "|---" * (len(SHORT) + 2) + "|"
    for family in protocol.families:
        runs = runs_of(protocol, family, lines)
        if protocol.reference not in runs:
            continue
        reference = runs[protocol.reference]
        budget = max(reference.by_budget)
        for contestant in protocol.contestants:
            mine = runs.get(contestant.recipe)
            if mine is None or mine is reference:
                continue
            if list(mine.by_budget) != protocol.budgets(family, contestant):
                continue
            draws = resample(mine, reference, protocol.num_bootstrap)
            cells = [
                ratio_words(ratios(mine, reference, measure, draws)[budget]) for measure in SHORT
            ]
            yield f"| {family} | `{contestant.recipe}` | {' | '.join(cells)} |"


def tuned(lines: list[Line]) -> Iterator[str]:
    """The best setting of each recipe and budget on validation, so far."""
    tried: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        if line["measures"] == "validation" and "failed" not in line:
            tried.setdefault((line["recipe"], line["budget"]), []).append(line)
    if not tried:
        return
    yield ""
    yield "| tuned on validation | budget | settings tried | lowest | best | with |"
    yield "|---|---|---|---|---|---|"
    for (recipe, budget), trials in tried.items():
        best = max(trials, key=lambda line: float(line["validation"]))
        lowest = min(float(line["validation"]) for line in trials)
        yield (
            f"| `{recipe}` | {budget:,} | {len(trials)} | {lowest:.1%} | "
            f"{best['validation']:.1%} | {settings_words(best)} |"
        )


def settings_words(line: Line) -> str:
    """What a run changed in its recipe."""
    changed = ", ".join(f"{key} {value}" for key, value in line["settings"].items())
    return changed or "as in params.yaml"


def ratio_words(ratio: Ratio) -> str:
    """A ratio with its interval; a dash for one that is not reached."""
    if ratio.value is None:
        return f"not reached ({ratio.reached:.0%} of draws)"
    low, high = ("not reached" if end is None else f"{end:.2f}" for end in (ratio.low, ratio.high))
    more = " or more" if ratio.high is not None and ratio.high >= ratio.most * (1 - 1e-9) else ""
    if ratio.is_bound:
        return f"at least {ratio.value:.2f} ({low} or more)"
    return f"{ratio.value:.2f} ({low} to {high}{more})"


def amount_words(measure: str, amount: float) -> str:
    """FLOPs in TFLOPs; rollouts and seconds whole."""
    return f"{amount / 1e12:.3f} T" if measure in ACCOUNTS else f"{amount:,.0f}"


def points(runs: dict[str, Runs]) -> Iterator[str]:
    """Every point of every frontier, with its settings."""
    yield f"| recipe | budget | seeds | test | spread | {' | '.join(SHOWN)} | settings | code |"
    yield "|---" * (len(SHOWN) + 7) + "|"
    for name, mine in runs.items():
        costs = {measure: mine.cost(measure) for measure in SHOWN}
        for place, (budget, lines) in enumerate(mine.by_budget.items()):
            tests = [line["test"] for line in lines]
            mean = sum(tests) / len(tests)
            cells = [amount_words(measure, costs[measure][place]) for measure in SHOWN]
            yield (
                f"| `{name}` | {budget:,} | {len(lines)} | {mean:.1%} | "
                f"{min(tests):.1%} to {max(tests):.1%} | {' | '.join(cells)} | "
                f"{settings_words(lines[0])} | "
                f"{', '.join(sorted({line['code'][:6] for line in lines}))} |"
            )
