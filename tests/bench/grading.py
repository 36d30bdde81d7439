"""Measure graded answers per second for each verifier: in one process (which a hostile answer can
hang), and with the pool.

    python -m tests.bench.grading [--answers 4000] [--processes 2] [--repeats 5]

Answers are generated, half of them correct, as long as the answers of GSM8K (about 300 characters).
Both ways alternate in one run, after a first round that starts processes; values are medians. Every
round has new answers, so no cache contains them. The last column is one training step.

If WINNOW_REAL_DATA names the folder of real data, `math` then grades a published evaluation with
fresh pools: unchanged, and without the boxes."""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import reasoning_gym as library

from tasks.common import registry
from tasks.grading import verifiers
from tasks.grading.grader import Answer, Grader
from tasks.grading.loading import load
from tasks.grading.settings import Verify
from tasks.grading.verifiers.reasoning_gym import gold

WORK = "She has 16 - 3 - 4 = 9 eggs a day, and sells each for $2, so 9 * 2 = 18 dollars. " * 3
CONFIGURED: dict[str, dict[str, Any]] = {
    "format": {"method": "format", "tags": ["think", "answer"], "text_after": False},
    "regex": {"method": "regex", "pattern": None, "match": "search"},
    "json_schema": {"method": "json_schema", "schema": None, "place": "either"},
    "ifeval": {"method": "ifeval", "loose": False},
    "qa": {"method": "qa", "threshold": None},
    "length": {
        "method": "length",
        "unit": "words",
        "minimum": None,
        "maximum": 50,
        "slack": 50,
    },
    "composite": {"method": "composite", "weights": {"math": 0.9, "format": 0.1}},
    "part": {
        "method": "part",
        "verifier": "math",
        "pattern": "(?s)<answer>(.*?)</answer>",
        "which": "last",
        "otherwise": "whole",
    },
}
RULES = json.dumps(
    {
        "instruction_id_list": ["punctuation:no_comma", "language:response_language"],
        "kwargs": [{}, {"language": "en"}],
    }
)


def answers(name: str, first: int, count: int) -> list[Answer]:
    """Return `count` answers from the number `first`, alternately right and wrong. If golds are
    values, all are different."""
    return [Answer(name, *completion_and_gold(name, i), False) for i in range(first, first + count)]


def completion_and_gold(name: str, i: int) -> tuple[str, str]:
    """Return a completion, which is right for even numbers `i`, or for odd ones, and its gold."""
    fraction, value = r"\frac{{{}}}{{7}}", i + i % 2
    match name:
        case "countdown":
            target = json.dumps({"numbers": [6, 34, 11], "target": 39})
            return WORK + f"\n34 + 11 {'-+'[i % 2]} 6", target
        case "reasoning_gym":
            return f"<answer>{i}</answer>", chain_sum()
        case "ifeval":
            return WORK[: 300 * (i % 2)] + "So.", RULES
        case "regex":
            return WORK + f"It is {i % 2}", r"It is 1\b"
        case "json_schema":
            schema = json.dumps({"type": "object", "required": ["a"]})
            return WORK + f'\n```json\n{{"{"ab"[i % 2]}": {i}}}\n```', schema
        case "choice":
            return WORK + f"The answer is {'AB'[i % 2]}.", "A"
        case "exact":
            return str(value), str(i)
        case "numeric":
            return WORK + f"\n#### {value}", str(i)
        case "hendrycks":
            return WORK + rf"\boxed{{{fraction.format(value)}}}", fraction.format(i)
    text = f"<think>{WORK}</think><answer>${fraction.format(value)}$</answer>"
    return text, fraction.format(i)


@cache
def chain_sum() -> str:
    """Return the gold of a problem of reasoning-gym."""
    return gold("chain_sum", library.create_dataset("chain_sum", seed=1, size=1)[0])


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(
    name: str, fresh: Iterator[int], count: int, processes: int, repeats: int
) -> tuple[float, float, float]:
    """Return the answers per second in this process and with the pool, and the pool's seconds for
    32 answers: medians. `fresh` gives numbers of ungraded answers, `count` at a time."""
    verifier = load(name, CONFIGURED)

    def grade_here(batch: list[Answer]) -> None:
        for answer in batch:
            verifier.verify(answer.completion, answer.gold)

    def timed(grade: Callable[[list[Answer]], object], num: int) -> float:
        return seconds(partial(grade, answers(name, next(fresh), num)))

    alone, pooled, step = [], [], []
    with Grader(Verify(processes, 20.0, 4.0, 1.0, CONFIGURED)) as grader:
        for _ in range(repeats + 1):
            alone.append(timed(grade_here, count))
            pooled.append(timed(grader.grade, count))
            step += [timed(grader.grade, 32) for _ in range(5)]
    rates = [count / statistics.median(times[1:]) for times in (alone, pooled)]
    return rates[0], rates[1], statistics.median(step[5:])


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
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(
        f"{'verifier':15} in-process/s  pool of {options.processes}/s  pool/in-process  32 answers "
        "(ms)"
    )
    fresh = itertools.count(0, options.answers)
    for name in registry.names(verifiers):
        if name in ("code", "judge"):  # see tests.bench.programs; a server limits the speed
            continue
        alone, pooled, step = measure(
            name, fresh, options.answers, options.processes, options.repeats
        )
        print(
            f"{name:15} {alone:12,.0f} {pooled:12,.0f} {pooled / alone:16.2f} {1000 * step:16.2f}"
        )
    if folder := os.environ.get("WINNOW_REAL_DATA"):
        measure_published(Path(folder), options.processes, options.repeats)


if __name__ == "__main__":
    main()
