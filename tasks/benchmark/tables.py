"""The results as a page: the headline, the points behind it, and the settings that were chosen."""

from collections.abc import Iterator
from pathlib import Path

from tasks.benchmark.headline import MEASURES, Ratio, Runs, ratios, runs_of
from tasks.benchmark.protocol import Protocol
from tasks.benchmark.results import Line, read_results
from tasks.common.files import replace_file

SHOWN = [name for name in MEASURES if name != "charged_paper"]


def write_tables(protocol: Protocol, file: Path, out: Path) -> None:
    """Write the page of a results file."""
    lines = list(read_results(file).values())
    text = "\n".join(page(protocol, lines, file.name)) + "\n"
    replace_file(out, lambda stream: stream.write(text.encode()))


def page(protocol: Protocol, lines: list[Line], source: str) -> Iterator[str]:
    """The page, line by line."""
    failed = [line for line in lines if "failed" in line]
    machines = sorted({line["machine"] for line in lines})
    seconds = sum(line["seconds"] for line in lines)
    yield "# Which recipe pays"
    yield ""
    yield (
        f"Made from `{source}` by `python -m flows.benchmark`: {len(lines)} cells, "
        f"{len(failed)} of them failed, {seconds / 3600:.1f} hours of one core; "
        f"{'; '.join(machines) or 'nothing has run yet'}."
    )
    for family in protocol.families:
        runs = runs_of(protocol, family, lines)
        yield from ("", f"## {family}", "")
        if protocol.reference in runs:
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


def headline(runs: dict[str, Runs], protocol: Protocol) -> Iterator[str]:
    """Ratios at each accuracy of the reference."""
    reference = runs[protocol.reference]
    for budget, rates in zip(reference.by_budget, reference.rates(), strict=True):
        yield (
            f"Times less compute than `{protocol.reference}` to its accuracy at {budget:,} "
            f"rollouts, {rates.mean():.1%} (95 % interval over seeds and prompts):"
        )
        yield ""
        yield f"| recipe | {' | '.join(SHOWN)} |"
        yield "|---" * (len(SHOWN) + 1) + "|"
        for name, mine in runs.items():
            if name == protocol.reference:
                continue
            cells = [
                ratio_words(ratios(mine, reference, measure, protocol.num_bootstrap)[budget])
                for measure in SHOWN
            ]
            yield f"| `{name}` | {' | '.join(cells)} |"
        yield ""


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
    ends = ["not reached" if end is None else f"{end:.2f}" for end in (ratio.low, ratio.high)]
    least = "at least " if ratio.is_bound else ""
    return f"{least}{ratio.value:.2f} ({ends[0]} to {ends[1]})"


def points(runs: dict[str, Runs]) -> Iterator[str]:
    """Every point of every frontier, with its settings."""
    yield f"| recipe | budget | seeds | test | spread | {' | '.join(SHOWN)} | settings |"
    yield "|---" * (len(SHOWN) + 6) + "|"
    for name, mine in runs.items():
        costs = {measure: mine.cost(measure) for measure in SHOWN}
        for place, (budget, lines) in enumerate(mine.by_budget.items()):
            tests = [line["test"] for line in lines]
            mean = sum(tests) / len(tests)
            cells = [f"{costs[measure][place]:.3g}" for measure in SHOWN]
            yield (
                f"| `{name}` | {budget:,} | {len(lines)} | {mean:.1%} | "
                f"{min(tests):.1%} to {max(tests):.1%} | {' | '.join(cells)} | "
                f"{settings_words(lines[0])} |"
            )
