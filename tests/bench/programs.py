"""Measure programs graded per second by the verifier `code`, for each form of tests and both
sandboxes.

    python -m tests.bench.programs [--programs 40] [--tests 10]

Programs are short and correct, so the sandbox is measured: the start of an interpreter, loading the
program, and its tests. One process grades; a pool grades one program per process at a time."""

import argparse
import json
import time

from tasks.grading.loading import load
from tasks.grading.programs.command import Kind, Sandbox
from tasks.grading.programs.sandbox import problem

KINDS: tuple[Kind, ...] = ("bubblewrap", "process")


def cases(num_tests: int) -> dict[str, tuple[str, str]]:
    """Return the program and the gold for each form of tests."""
    numbers = range(num_tests)
    stdin = {"inputs": [f"{i} 2\n" for i in numbers], "outputs": [f"{i + 2}\n" for i in numbers]}
    calls = {"inputs": [[i, 2] for i in numbers], "outputs": [i + 2 for i in numbers]}
    asserts = [f"assert add({i}, 2) == {i + 2}" for i in numbers]
    add = "def add(a, b):\n    return a + b"
    return {
        "standard input": (
            "a, b = map(int, input().split())\nprint(a + b)",
            json.dumps({"stdin_stdout": stdin}),
        ),
        "calls": (add, json.dumps({"fn_name": "add", **calls})),
        "assertions": (add, json.dumps({"asserts": asserts})),
    }


def rate(kind: Kind, program: str, gold: str, count: int) -> float:
    """Return the programs graded per second."""
    settings = {
        "language": "python",
        "sandbox": kind,
        "seconds": 10.0,
        "total_seconds": 60.0,
        "memory_mb": 512,
        "packages": False,
        "prelude": "",
        "float_tolerance": None,
        "other_asserts": "refuse",
        "stop_at_failure": False,
    }
    verify = load("code", {"code": settings}).verify
    completion = f"```python\n{program}\n```"
    started = time.perf_counter()
    for _ in range(count):
        verdict = verify(completion, gold)
        assert verdict.outcome == "correct", verdict
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--tests", type=int, default=10)
    options = parser.parse_args()
    print(f"{'sandbox':12} {'tests':16} programs/s ({options.tests} tests each)")
    for kind in KINDS:
        if (reason := problem(Sandbox(kind, 512, False))) is not None:
            print(f"{kind:12} {reason}")
            continue
        for name, (program, gold) in cases(options.tests).items():
            print(f"{kind:12} {name:16} {rate(kind, program, gold, options.programs):10.1f}")


if __name__ == "__main__":
    main()
