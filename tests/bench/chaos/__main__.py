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
import queue
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tasks.common.processes.locks import exclusive
from tests.bench.chaos import bucket, checks, events, faults, making, operations, world
from tests.bench.chaos.events import Event
from tests.bench.chaos.remedies import DOCS, follow, unclear
from tests.bench.chaos.world import World

COUNTED = {
    "outputs": "with lost outputs",
    "store": "with lost rows",
    "verdicts": "with changed verdicts",
    "unclear message": "with unclear messages",
}
FAILED = (1, 2, 255)  # exit statuses with an error message, unlike signals
MAX_TRIES = 4  # of a command after the end of the fault


def run_event(place: World, event: Event, buckets: "bucket.Buckets | None") -> dict[str, Any]:
    """Run one event from beginning to end, and return its line of the file."""
    started = time.perf_counter()
    place.restore(world.DONE if event.kind in events.WHOLE else event.stage)
    with bucket.of(event, place, buckets) as store:
        done = happen(place, event) if store is None else store.disturb(event)
        if done["status"] in FAILED:
            done["unclear"] = unclear(place.log.read_text(errors="replace"))
        tries = repeat(place, event, {} if store is None else store.environment)
        location = None if store is None else store.location
        found = list(judge(place, event, done, tries, location))
    lost = [name for name, _ in found if name not in checks.KNOWN]
    return {
        **event.as_dict(),
        "done": done,
        "tries": tries,
        "failures": found,
        "known": sorted({name for name, _ in found} & set(checks.KNOWN)),
        "outcome": "lost" if lost else "survived",
        "seconds": round(time.perf_counter() - started, 2),
    }


def happen(place: World, event: Event) -> dict[str, Any]:
    """Run the event's command and disturb it; return the disturbance and its result."""
    done = faults.ACTIONS[event.kind](place, event)
    place.plan.go_on()
    return done


def repeat(place: World, event: Event, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the same command again until it succeeds, after the remedy that an error names, if any.
    Return the statuses and, for failures, the last words and the remedy."""
    tries: list[dict[str, Any]] = []
    while len(tries) < MAX_TRIES and (not tries or tries[-1]["status"]):
        line = event.command(place)
        code, said = place.run(line, forked=True, **environment)
        tries.append({"status": code})
        if code:
            words = {"said": said[-1500:], "unclear": unclear(said)}
            tries[-1] |= {**words, "remedy": follow(place, said)}
    return tries


def judge(
    place: World,
    event: Event,
    done: dict[str, Any],
    tries: list[dict[str, Any]],
    location: str | None,
) -> Iterator[tuple[str, str]]:
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
    yield from checks.failures(place, event, location)


class Harness:
    """The remaining events, and the file that stores them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "events.jsonl"
        self.kinds = [kind for kind in events.KINDS if self.is_possible(kind)]
        self.buckets: bucket.Buckets | None = None

    def is_possible(self, kind: str) -> bool:
        chosen = self.options.kind
        if chosen and kind not in chosen:
            return False
        if kind in bucket.KINDS:
            return bucket.missing() is None
        return kind != "full file system" or os.geteuid() == 0

    def past(self) -> list[dict[str, Any]]:
        """Return the stored events of this seed."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line for line in map(json.loads, lines) if line["seed"] == self.options.seed]

    def numbers(self) -> list[int]:
        if self.options.only is not None:
            return [self.options.only]
        stored = {line["number"] for line in self.past()}
        return [n for n in range(self.options.events) if n not in stored]

    def run(self) -> int:
        numbers = [] if self.options.table else self.numbers()
        if not numbers:
            return self.conclude(set())
        with exclusive(self.folder / "lock", "the worlds of this folder"):
            return self.run_all(numbers)

    def run_all(self, numbers: list[int]) -> int:
        """Run the events in as many worlds as there are workers."""
        library = operations.build(self.folder)
        drawn = [events.draw(self.options.seed, number, self.kinds) for number in numbers]
        if {event.kind for event in drawn} & set(bucket.KINDS):
            self.buckets = bucket.Buckets.start(self.folder / "s3")
        places: list[World] = []
        free: queue.SimpleQueue[World] = queue.SimpleQueue()

        def attempt(event: Event) -> dict[str, Any]:
            place = free.get()
            try:
                return self.attempt(place, event)
            finally:
                free.put(place)

        try:
            with tqdm(total=len(numbers), unit="event", mininterval=5) as bar:
                for number in range(min(self.options.workers, len(numbers))):
                    folder = self.folder / str(number)
                    places.append(making.make_world(library, folder, *places[:1]))
                    free.put(places[-1])
                with ThreadPoolExecutor(len(places)) as pool:
                    for done in as_completed([pool.submit(attempt, event) for event in drawn]):
                        self.note(done.result(), bar)
        finally:
            for place in places:
                place.close()
            if self.buckets:
                self.buckets.stop()
        used = os.times()
        seconds = used.children_user + used.children_system
        print(f"{len(numbers)} events in {bar.format_dict['elapsed']:.0f} s, of which at least")
        print(f"{seconds / len(numbers):.1f} s of a processor each, the making of worlds included")
        return self.conclude(set(numbers))

    def attempt(self, place: World, event: Event) -> dict[str, Any]:
        try:
            return run_event(place, event, self.buckets)
        except Exception:  # an error of the harness: report the event, continue with the others
            world.end(place.processes())
            said = traceback.format_exc()[-2000:]
            failed = {"done": {}, "tries": [], "failures": [["harness", said]], "known": []}
            return {**event.as_dict(), **failed, "outcome": "lost", "seconds": 0.0}

    def note(self, line: dict[str, Any], bar: "tqdm[Any]") -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if line["outcome"] != "survived" or self.options.only is not None:
            bar.write(json.dumps(line, indent=1))
        bar.update()

    def conclude(self, numbers: set[int]) -> int:
        lines = self.past()
        if self.options.only is not None:
            lines = [line for line in lines if line["number"] in numbers][-1:]
        print(summary(lines))
        return int(any(line["outcome"] == "lost" for line in lines))


def summary(lines: list[dict[str, Any]]) -> str:
    """Return the table, the failures with a known reason, the failures by name, and the numbers of
    the events with losses."""
    failed = Counter(name for line in lines for name in {name for name, _ in line["failures"]})
    counts = ", ".join(f"{failed[name]} {what}" for name, what in COUNTED.items())
    known = Counter(name for line in lines for name in line["known"])
    lost = [str(line["number"]) for line in lines if line["outcome"] == "lost"]
    rows = [f"known: {name}: {number} ({checks.KNOWN[name]})" for name, number in known.items()]
    last = [f"lost: {' '.join(lost)}"] if lost else []
    return "\n".join([table(lines), *rows, f"{len(lines)} events: {counts}", *last])


def table(lines: list[dict[str, Any]]) -> str:
    """Return one row for every kind of event."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_kind[line["kind"]].append(line)
    rows = ["| kind | events | hit | lost | seconds each |", "|---|---|---|---|---|"]
    ordered = [(kind, by_kind[kind]) for kind in events.KINDS if by_kind[kind]]
    for kind, part in [*ordered, ("all", lines)]:
        hit = sum(bool(line["done"].get("hit")) for line in part)
        lost = sum(line["outcome"] == "lost" for line in part)
        mean = sum(line["seconds"] for line in part) / max(len(part), 1)
        rows.append(f"| {kind} | {len(part)} | {hit} | {lost} | {mean:.0f} |")
    return "\n".join(rows)


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
    parser.add_argument("--table", action="store_true", help="print the table, and run nothing")
    parser.add_argument("--only", type=int, help="the event of this number alone")
    parser.add_argument("--kind", action="append", choices=list(events.KINDS))
    return Harness(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
