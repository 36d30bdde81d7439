"""`reasoning_gym`: the library's scorer of the task (arXiv 2505.24760), which accepts every correct
answer to a problem.

The gold is the JSON text {"task": "countdown", "entry": {"answer": ..., "metadata": {...}}},
because the scorer requires the whole problem (see `gold`). The answer in tags or a box is scored,
else the whole completion. The score is kept; `correct` is a score of 1. For a reward with partial
credit, use this verifier in a composite.

Some scorers (countdown, puzzle24, polynomials, integrals, boards, ...) pass the answer to Python's
or sympy's `eval`. They receive only harmless text: numbers, names, operators, lists, calls of
mathematical functions."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn

from tasks.grading.answers.marked import marked_answer
from tasks.grading.verdict import Verdict

LIBRARIES = ("reasoning-gym",)
ANSWERS = True

EVALUATION = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
FUNCTIONS = {
    "sqrt", "cbrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs", "abs",
}  # fmt: skip
CALL = re.compile(r"([^\W\d]\w*)?\s*\(")
HARMFUL = re.compile(
    r"__|[\\#;@`]|\.\s*[^\W\d]|[)\]}]\s*\(|\b(?:lambda|for|import|yield|await)\b|:="
)


def gold(task: str, entry: Mapping[str, Any]) -> str:
    """Return the gold of a library problem: the fields that a scorer may require, but not the
    problem's position in the library's data set, so that equal problems have equal golds."""
    place = ("source_dataset", "source_index")
    metadata = {name: value for name, value in entry["metadata"].items() if name not in place}
    found = {"task": task, "entry": {"answer": entry["answer"], "metadata": metadata}}
    return json.dumps(found, ensure_ascii=False, sort_keys=True, default=str)


def verify(completion: str, answer: str) -> Verdict:
    """Return the score, with `correct` if it is 1, else `wrong`; `unparsed` for a completion that
    has no answer, or an unsafe one that the scorer would run as code."""
    problem = json.loads(answer)
    given = marked_answer(completion)
    if not given:
        return Verdict("unparsed", "")
    if evaluates(problem["task"]) and not is_harmless(given):
        return Verdict("unparsed", given)
    if problem["task"] in ("arc_agi", "rearc"):  # their scorers compare tuples, which JSON lacks
        metadata = problem["entry"]["metadata"]
        metadata["output"] = tuple(map(tuple, metadata["output"]))
    score = float(scorer(problem["task"])(given, problem["entry"]))
    return Verdict("correct" if score >= 1.0 else "wrong", given, min(max(score, 0.0), 1.0))


def canonical_completion(answer: str) -> str | None:
    """Return the library's answer in tags, or None for problems with many answers."""
    own = json.loads(answer)["entry"]["answer"]
    return None if own is None else f"<answer>{own}</answer>"


@cache
def evaluates(task: str) -> bool:
    """Return whether the task's scorer evaluates the answer as code."""
    return EVALUATION.search(inspect.getsource(scorer(task))) is not None


def is_harmless(text: str) -> bool:
    """Return whether evaluating `text` can only do arithmetic and build lists. It must contain no
    attribute, no call except of FUNCTIONS, and no bracket `(` if it contains quotes, because
    sympy's functions would evaluate quoted text in turn."""
    called = {name for name in CALL.findall(text) if name}
    quoted = "'" in text or '"' in text
    return not HARMFUL.search(text) and called <= FUNCTIONS and not (quoted and "(" in text)


@cache
def scorer(task: str) -> Callable[[str, Any], float]:
    """Return the library's scorer of a task."""
    return get_score_answer_fn(task)  # type: ignore[no-any-return]
