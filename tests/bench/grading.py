"""Measure graded answers per second for each verifier: in one process (which a hostile answer can
hang), and with the pool.

    python -m tests.bench.grading [--answers 4000] [--programs 40] [--processes 2] [--repeats 5]

The answers are the correct ones of tests/grading/test_verifiers.py, where the verifier allows it
after a text as long as the answers of GSM8K (about 300 characters). The programs of `code` are
short and correct, so its sandboxes are measured: the start of an interpreter, loading the program,
and its tests in each form. Both ways alternate; values are medians.

If WINNOW_REAL_DATA names the folder of real data, `math` then grades a published evaluation with
fresh pools: unchanged, and without the boxes."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tasks.grading.grader import Answer, Grader
from tasks.grading.loading import load
from tasks.grading.programs.command import Sandbox
from tasks.grading.programs.sandbox import problem
from tasks.grading.settings import Verify
from tests.grading.test_code import ADD, ASSERTS, SETTINGS, SUM
from tests.grading.test_verifiers import CONFIGURED, GOLDS, RIGHT, names

WORK = "She has 16 - 3 - 4 = 9 eggs a day, and sells each for $2, so 9 * 2 = 18 dollars. " * 3
SANDBOXES = {f"code, {kind}": {**SETTINGS, "sandbox": kind} for kind in ("bubblewrap", "process")}
VERIFIERS = {**CONFIGURED, **SANDBOXES}
SUM_OF_INPUT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
PROGRAMS = {
    "calls": (RIGHT["code"], ADD),
    "standard input": (SUM_OF_INPUT, SUM),
    "assertions": (RIGHT["code"], ASSERTS),
}


def cases() -> Iterator[tuple[str, Answer]]:
    """Yield a correct answer for each verifier, and for each sandbox and form of tests."""
    for name in sorted({*names()} - {"code"}):
        right, gold = RIGHT.get(name, "7"), GOLDS.get(name, "7")
        after_work = load(name, VERIFIERS).verify(WORK + right, gold).outcome == "correct"
        yield name, Answer(name, WORK * after_work + right, gold, False)
    for name, settings in SANDBOXES.items():
        if reason := problem(Sandbox(settings["sandbox"], settings["memory_mb"], False)):
            print(f"{name}: {reason}")
            continue
        for form, (program, gold) in PROGRAMS.items():
            yield f"{name}, {form}", Answer(name, program, gold, False)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(grader: Grader, answer: Answer, count: int, repeats: int) -> tuple[float, float]:
    """Return the answers per second in this process and with the pool: medians."""
    verifier = load(answer.verifier, VERIFIERS)

    def grade_here() -> None:
        for _ in range(count):
            assert verifier.verify(answer.completion, answer.gold).outcome == "correct"

    alone, pooled = [], []
    for _ in range(repeats):
        alone.append(seconds(grade_here))
        pooled.append(seconds(partial(grader.grade, [answer] * count)))
    return count / statistics.median(alone), count / statistics.median(pooled)


def published(folder: Path) -> dict[str, list[Answer]]:
    """Return completions of Qwen2.5-Math on MATH (about 1,200 characters), original and unboxed."""
    lines = (folder / "rollouts" / "qwen25math_math100x8.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    boxed = [Answer("math", text, str(row["gt"]), False) for row in rows for text in row["code"]]
    unboxed = [replace(a, completion=a.completion.replace("\\boxed", "")) for a in boxed]
    return {"boxed": boxed, "unboxed": unboxed}


def measure_published(folder: Path, processes: int, repeats: int) -> None:
    """Print the median rate of grading all completions, with a new pool each time."""
    for kind, batch in published(folder).items():
        rates = []
        for _ in range(repeats):
            with Grader(Verify(processes, 20.0, 4.0, 1.0, {})) as grader:
                grader.grade([Answer("math", r"\boxed{1}", "1", False)] * 8)
                rates.append(len(batch) / seconds(partial(grader.grade, batch)))
        print(
            f"math, {len(batch)} published completions, {kind}: {statistics.median(rates):,.0f}/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'verifier':32} in-process/s  pool of {options.processes}/s")
    found = dict(cases())
    with Grader(Verify(options.processes, 20.0, 4.0, 1.0, VERIFIERS)) as grader:
        grader.grade([*found.values()] * options.processes)  # starts the processes
        for name, answer in found.items():
            count = options.programs if answer.verifier in SANDBOXES else options.answers
            alone, pooled = measure(grader, answer, count, options.repeats)
            print(f"{name:32} {alone:12,.1f} {pooled:12,.1f}", flush=True)
    if folder := os.environ.get("WINNOW_REAL_DATA"):
        measure_published(Path(folder), options.processes, options.repeats)


if __name__ == "__main__":
    main()
