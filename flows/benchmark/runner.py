"""Run the cells of a protocol that the results file lacks, several at a time.

The results file alone determines the next cells. A trial continues to the next budget when all
trials of this budget are done and it is among the best on validation. When all searches of a recipe
are done, the settings chosen for an account or by a search are run on test, with every seed. So a
benchmark that is killed or stopped continues from the same state."""

import logging
import multiprocessing
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import torch

from flows.benchmark import cells
from flows.benchmark.frontier import MEASURES, best_by_budget, selected_trials
from flows.benchmark.oracle import family_facts
from flows.benchmark.protocol import (
    BenchmarkCell,
    Contestant,
    Protocol,
    Values,
    identity_of,
    make_cell,
    settings_of,
    survivors,
    trials,
)
from flows.benchmark.results import (
    Line,
    append_result,
    current,
    facts_file,
    read_facts,
    read_results,
    supersede,
)
from tasks.common.artifacts import PROFILE
from tasks.common.files import write_json
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.processes.ending import die_with_parent
from tasks.common.progress import progress
from tasks.common.recipes import merged
from tasks.common.stage import StageError

logger = logging.getLogger(__name__)

SECONDS_A_ROLLOUT = 1 / 250  # of training; the default until cells have been measured
SECONDS_ALWAYS = 20.0  # per cell: start, validation, test

Find = Callable[[BenchmarkCell], Line | None]
"""A function that returns the line of a cell, or None."""


def runnable(
    protocol: Protocol, values: Values, results: Mapping[str, Line]
) -> Iterator[BenchmarkCell]:
    """Yield the cells that can run next and have no line, in the order in which they should run, so
    that the first recipes have results before the last ones are tried."""
    for contestant in protocol.contestants:
        for family in protocol.families:
            for cell in turn(protocol, values, family, contestant, lambda c: results.get(c.key)):
                if cell.key not in results:
                    yield cell


def turn(
    protocol: Protocol, values: Values, family: str, contestant: Contestant, find: Find
) -> Iterator[BenchmarkCell]:
    """Yield a recipe's cells on a family, if all results that they depend on exist."""
    owner = (family, protocol.families[family])
    made = partial(make_cell, values, owner, contestant.recipe)
    tried: list[Line] = []
    is_whole = True
    for seed in protocol.search.seeds:
        settings = trials(protocol.search, contestant, seed)
        for rung, budget in enumerate(protocol.budgets(family, contestant)):
            settings = settings[: survivors(contestant.trials, protocol.search.keep_share, rung)]
            at_rung = [made(budget, seed, "validation", setting) for setting in settings]
            yield from at_rung
            lines = [line for cell in at_rung if (line := find(cell)) is not None]
            if len(lines) < len(at_rung):
                is_whole = False
                break
            lines.sort(key=lambda line: -float(line.get("validation", -1.0)))  # failed ones last
            settings = [dict(line["settings"]) for line in lines]
            tried += lines
    if is_whole:
        for trial in tested(tried):
            for seed in protocol.seeds:
                yield made(trial["budget"], seed, "test", trial["settings"])


def tested(trials: Collection[Line]) -> list[Line]:
    """Return the trials whose settings are run on test, without duplicates: those chosen for each
    account, and each search's own best, which give the spread between searches."""
    good = [line for line in trials if "failed" not in line]
    wanted = [trial for measure in MEASURES if good for trial in selected_trials(good, measure)]
    for seed in dict.fromkeys(line["seed"] for line in good):
        wanted += best_by_budget(line for line in good if line["seed"] == seed).values()
    by_settings = {settings_of(trial): trial for trial in reversed(wanted)}
    return sorted(by_settings.values(), key=lambda trial: int(trial["budget"]))


def lines_of(protocol: Protocol, values: Values, family: str, find: Find) -> list[Line]:
    """Return the existing lines of the cells that `turn` yields for a family."""
    found = {
        line["key"]: line
        for contestant in protocol.contestants
        for cell in turn(protocol, values, family, contestant, find)
        if (line := find(cell)) is not None
    }
    return list(found.values())


def due(protocol: Protocol, values: Values, lines: Collection[Line]) -> list[Line]:
    """Return the lines to show: those of the cells that `turn` yields, and so none of other
    settings, other code or an older protocol. A family whose reference has a test run only in its
    superseded lines is shown with these: for each recipe, the lines with the same reason as its
    last superseded line, because they were superseded together."""
    results = current(lines)
    marked = [line for line in lines if "superseded" in line]
    last = {(line["family"], line["recipe"]): line["superseded"] for line in marked}
    old = {
        identity_of(line): line
        for line in marked
        if line["superseded"] == last[line["family"], line["recipe"]]
    }

    def is_tested(line: Line) -> bool:
        return line["measures"] == "test" and line["recipe"] in protocol.reference

    shown = []
    for family in protocol.families:
        of_now = lines_of(protocol, values, family, lambda cell: results.get(cell.key))
        if not any(map(is_tested, of_now)):
            of_old = lines_of(protocol, values, family, lambda cell: old.get(cell.identity))
            of_now = of_old if any(map(is_tested, of_old)) else of_now
        shown += of_now
    return shown


def supersede_others(protocol: Protocol, values: Values, file: Path, reason: str) -> None:
    """Mark as superseded the lines that belong to no cell of the current protocol and code."""
    results = read_results(file)
    own = {
        line["key"]
        for family in protocol.families
        for line in lines_of(protocol, values, family, lambda cell: results.get(cell.key))
    }
    num = supersede(file, results.keys() - own, reason)
    logger.info("%d lines are superseded: %s", num, reason)


def expected_hours(protocol: Protocol, results: Mapping[str, Line], workers: int) -> float:
    """Return the remaining hours at the rate of the finished cells. They are a lower bound, because
    the number of settings to run on test is unknown until the searches are done."""
    finished = [line for line in results.values() if "failed" not in line]
    rate = SECONDS_A_ROLLOUT
    if finished:
        spent = sum(max(line["seconds"] - SECONDS_ALWAYS, 0.0) for line in finished)
        rate = max(spent / sum(line["budget"] for line in finished), 1e-4)
    needed, done = list[int](), list[int]()
    for family in protocol.families:
        for contestant in protocol.contestants:
            own = (family, contestant.recipe)
            done += [r["budget"] for r in results.values() if (r["family"], r["recipe"]) == own]
            for rung, budget in enumerate(protocol.budgets(family, contestant)):
                num = survivors(contestant.trials, protocol.search.keep_share, rung)
                num *= len(protocol.search.seeds)
                needed += [budget] * (num + len(protocol.seeds))
    left = sum(needed) - sum(done), len(needed) - len(done)
    return float(max(left[0] * rate + left[1] * SECONDS_ALWAYS, 0.0) / workers / 3600)


def prepare(protocol: Protocol, values: Values, work: Path, file: Path, project: Layout) -> None:
    """Make the data that the cells of each family share, and write the facts beside the results.
    Raise ParamsError for a family whose results are from another initial policy."""
    facts, measured = read_facts(file), {line["family"] for line in read_results(file).values()}
    for name, family in protocol.families.items():
        changed = merged(values, family.changes)
        same = changed["policy"] == values["policy"] and project.policy_card.exists()
        cells.prepare_family(work, name, changed, project if same else None)
        profile = cells.family_layout(work, name).profile / "profile.parquet"
        before, facts[name] = facts.get(name), family_facts(PROFILE.read(profile))
        if before and name in measured and before["pass_rate"] != facts[name]["pass_rate"]:
            raise ParamsError(
                f"the initial policy of {name} solves {facts[name]['pass_rate']:.2%} here, and "
                f"{before['pass_rate']:.2%} in {file}: a CPU of another model rounds differently, "
                "or the family has changed. Copy the family's folder from where the results were "
                f"made to {work / 'families'}, or mark the results with --supersede"
            )
        write_json(facts_file(file), facts)


def run(protocol: Protocol, values: Values, work: Path, file: Path, workers: int) -> None:
    """Run all missing cells, `workers` at a time. Append each line as soon as its cell is done."""
    results = read_results(file)
    context = multiprocessing.get_context("spawn")
    total = sum(1 for _ in runnable(protocol, values, results))
    with (
        ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool,
        progress(None, "benchmark", "cell") as bar,
    ):
        logger.info("%d cells are done, %d can run now", len(results), total)
        running: dict[Future[Line], BenchmarkCell] = {}
        try:
            while True:
                busy = {cell.key for cell in running.values()}
                waiting = [c for c in runnable(protocol, values, results) if c.key not in busy]
                for cell in waiting[: workers - len(running)]:
                    running[pool.submit(run_in_worker, cell, work)] = cell
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    cell = running.pop(future)
                    line = line_of(future, [cell, *running.values()])
                    append_result(file, line)
                    results[cell.key] = line
                    bar.update(1)
                    bar.set_postfix_str(cell.name, refresh=False)
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):
                process.terminate()
            raise


def run_in_worker(cell: BenchmarkCell, work: Path) -> Line:
    """Run a cell in a worker. On interrupt, kill the worker: else the pool would wait forever."""
    try:
        return cells.run_cell(cell, work)
    except KeyboardInterrupt:
        signal.raise_signal(signal.SIGKILL)
        raise


def line_of(future: Future[Line], ran: Collection[BenchmarkCell]) -> Line:
    """Return the line of a cell that has finished. Raise StageError, with the names of the cells
    that `ran`, if a worker was killed."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        names = ", ".join(sorted(cell.name for cell in ran))
        raise StageError(
            f"a worker was killed while these cells ran: {names}. Run the same command again to "
            "resume; with fewer --workers, if memory was short"
        ) from error


def start_worker() -> None:
    """Make a worker die with its parent, ignore Ctrl-C outside training, and use one thread."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
