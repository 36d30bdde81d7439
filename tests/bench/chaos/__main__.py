"""Inject faults of every kind into a small world, and check that nothing is lost.

    python -m tests.bench.chaos FOLDER [--events 500] [--seed 0] [--workers 2]
    python -m tests.bench.chaos FOLDER --only 37

An event restores the world to the state before a stage (`world`), runs a command and disturbs it
(`faults`), runs the same command until it succeeds, and compares the world with an undisturbed one
(`checks`). All random choices follow from the seed and the event's number. FOLDER contains the
worlds, one per worker, and one line of JSON per event in `events.jsonl`: an interrupted run
continues with the missing events. The status is 1 if anything was lost.

Requires Linux and a C compiler. Events that need root (a file system of limited size), bubblewrap
or an S3 server are skipped if that is missing."""

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tasks.common.processes.locks import exclusive
from tests.bench.chaos import bucket, checks, events, faults, making, operations, world
from tests.bench.chaos.events import Event
from tests.bench.chaos.remedies import DOCS, follow, unclear
from tests.bench.chaos.world import World

FAILED = (1, 2, 255)  # exit statuses with an error message, unlike signals
MAX_TRIES = 4  # of a command after the end of the fault
Line = dict[str, Any]


def run_event(place: World, event: Event) -> Line:
    """Run one event from beginning to end, and return its line of the file."""
    started = time.perf_counter()
    place.restore(world.DONE if event.kind in events.WHOLE else event.stage)
    done = (bucket if event.kind in bucket.KINDS else faults).disturb(place, event)
    if done["status"] in FAILED:
        done["unclear"] = unclear(place.log.read_text(errors="replace"))
    tries = repeat(place, event)
    found = list(judge(place, event, done, tries))
    return {
        **asdict(event),
        "done": done,
        "tries": tries,
        "failures": found,
        "outcome": "lost" if {name for name, _ in found} - set(checks.KNOWN) else "survived",
        "seconds": round(time.perf_counter() - started, 2),
    }


def repeat(place: World, event: Event) -> list[Line]:
    """Run the same command again until it succeeds, after the remedy that an error names, if any.
    Return the statuses and, for failures, the last words and the remedy."""
    tries: list[Line] = []
    while len(tries) < MAX_TRIES and (not tries or tries[-1]["status"]):
        code, said = place.run(event.command(place), forked=True)
        tries.append({"status": code})
        if code:
            words = {"said": said[-1500:], "unclear": unclear(said)}
            tries[-1] |= {**words, "remedy": follow(place, said)}
    return tries


def judge(place: World, event: Event, done: Line, tries: list[Line]) -> Iterator[tuple[str, str]]:
    """Yield every violation."""
    if done.get("orphans"):
        yield "orphans", "; ".join(map(str, done["orphans"]))
    yield from done.get("wrong", ())
    for each in filter(None, (each.get("unclear") for each in (done, *tries))):
        yield "unclear message", each
    if done["status"] is None:
        yield "hang", f"the command did not end in {world.SECONDS:.0f} s"
    if done.get("said") is False:
        yield "full disk", "a command failed, and did not name the full disk"
    if done.get("said") in faults.DVC_SAYS:
        yield "dvc's words", done["words"]
    if tries[-1]["status"]:
        yield "again", f"the command fails {len(tries)} times: {tries[-1]['said'][-300:]}"
        return
    if followed := [each for each in (done, *tries) if each.get("remedy") == DOCS]:
        said = [each.get("said") or each["words"] for each in followed]
        yield "dvc's errors", "; ".join(words[-200:] for words in said)
    for once_more in (each for each in tries[:-1] if each["remedy"] != DOCS):
        remedy = once_more["remedy"] or ""
        name = "dvc's errors" if remedy.startswith("git ") else "again"
        name = "dvc's lock" if "rwlock" in remedy else name
        yield name, f"the command fails once more: {once_more['said'][-300:]}"
    yield from checks.failures(place, event)


def is_possible(kind: str) -> bool:
    """Return whether this machine has what the events of a kind need."""
    if kind in bucket.KINDS:
        return bucket.missing() is None
    return kind != "full file system" or os.geteuid() == 0


def past(folder: Path, seed: int) -> list[Line]:
    """Return the stored events of this seed."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["seed"] == seed]


def run_all(
    folder: Path, drawn: list[Event], num_workers: int, note: Callable[[Line], None]
) -> None:
    """Run the events in as many worlds as there are workers, and pass their lines to `note`."""
    library = operations.build(folder)
    needs_server = any(event.kind in bucket.KINDS for event in drawn)
    server = bucket.start(folder / "s3") if needs_server else None

    def work(number: int) -> None:
        place = making.make_world(library, folder / str(number))
        place.server = server
        try:
            for event in drawn[number::num_workers]:
                note(attempt(place, event))
        finally:
            place.close()

    try:
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(work, range(min(num_workers, len(drawn)))))
    finally:
        if server:
            server.stop()


def attempt(place: World, event: Event) -> Line:
    try:
        return run_event(place, event)
    except Exception:  # an error of the harness: report the event, continue with the others
        world.end(place.processes())
        failures = [["harness", traceback.format_exc()[-2000:]]]
        failed = {"done": {}, "tries": [], "failures": failures, "outcome": "lost", "seconds": 0.0}
        return {**asdict(event), **failed}


def summary(lines: list[Line]) -> str:
    """Return one row for every kind of event, the number of failures by name, and the numbers of
    the events with losses."""
    rows = ["| kind | events | hit | lost | seconds each |", "|---|---|---|---|---|"]
    for kind in (*events.KINDS, "all"):
        part = [line for line in lines if kind in (line["kind"], "all")]
        hit = sum(bool(line["done"].get("hit")) for line in part)
        lost = sum(line["outcome"] == "lost" for line in part)
        mean = sum(line["seconds"] for line in part) / max(len(part), 1)
        rows += [f"| {kind} | {len(part)} | {hit} | {lost} | {mean:.0f} |"] * bool(part)
    failed = Counter(name for line in lines for name in {name for name, _ in line["failures"]})
    for name, number in failed.items():
        known = f" ({checks.KNOWN[name]})" if name in checks.KNOWN else ""
        rows.append(f"{name}: {number}{known}")
    numbers = [str(line["number"]) for line in lines if line["outcome"] == "lost"]
    return "\n".join([*rows, f"lost: {' '.join(numbers) or 'nothing'}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="where the worlds and events.jsonl stand; best in memory")
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, help="the event of this number alone")
    options = parser.parse_args()
    folder = Path(options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "lock", "the worlds of this folder"):
        stored = {line["number"] for line in past(folder, options.seed)}
        numbers = [n for n in range(options.events) if n not in stored]
        numbers = numbers if options.only is None else [options.only]
        kinds = [kind for kind in events.KINDS if is_possible(kind)]
        drawn = [events.draw(options.seed, number, kinds) for number in numbers]
        with tqdm(total=len(drawn), unit="event", mininterval=5) as bar:

            def note(line: Line) -> None:
                with (folder / "events.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if line["outcome"] != "survived" or options.only is not None:
                    bar.write(json.dumps(line, indent=1))
                bar.update()

            run_all(folder, drawn, options.workers, note)
        lines = past(folder, options.seed)
    lines = lines if options.only is None else lines[-1:]
    print(summary(lines))
    return int(any(line["outcome"] == "lost" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
