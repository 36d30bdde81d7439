"""The presets of programs on rows with the published columns: prompts, and verdicts on the solution
of a row and on another program."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.common.params import ParamsError
from tasks.ingest.candidates import Row
from tests.grading.test_code import graded
from tests.ingest.helpers import found, lines, preset

APPS: dict[str, Any] = {
    "problem_id": 7,
    "question": "Read two numbers and print their sum.\n",
    "solutions": json.dumps(["a, b = map(int, input().split())\nprint(a + b)\n"]),
    "input_output": json.dumps({"inputs": ["1 2\n", "5 -7\n"], "outputs": ["3\n", "-2\n"]}),
    "difficulty": "introductory",
    "url": "",
    "starter_code": "",
}
CALLS = {
    **APPS,
    "question": "Add two numbers.",
    "solutions": json.dumps(["class Solution:\n    def add(self, a, b): return a + b"]),
    "input_output": json.dumps(
        {"fn_name": "add", "inputs": [[1, 2], [5, -7]], "outputs": [[3], [-2]]}
    ),
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
}
MBPP: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(5, -7) == -2"],
    "test_setup_code": "",
    "challenge_test_list": ["assert add(0, 0) == 0"],
}

DOUBLE: dict[str, Any] = {
    "task_id": "HumanEval/900",
    "prompt": (
        "from typing import List\n\n\ndef double_all(numbers: List[int]) -> List[int]:\n"
        '    """ Double every number.\n    >>> double_all([1, 4])\n    [2, 8]\n    """\n'
    ),
    "canonical_solution": "    return [2 * n for n in numbers]\n",
    "entry_point": "double_all",
    "test": (
        "\n\nMETADATA = {\n    'author': 'nobody',\n    'dataset': 'test'\n}\n\n\n"
        "def check(candidate):\n    assert candidate([]) == []\n"
        "    assert candidate([3, -1]) == [6, -2]\n"
    ),
}


def rows(tmp_path: Path, name: str, *content: Any, **settings: Any) -> list[Row]:
    kept, rejected = found(preset(name, lines(tmp_path / "a.jsonl", *content), **settings))
    assert rejected == []
    return kept


def test_apps_prompt_includes_the_starter_code(tmp_path: Path) -> None:
    plain, calls = rows(tmp_path, "apps", APPS, CALLS)
    assert plain.prompt == "Read two numbers and print their sum.\n"
    assert calls.prompt == (
        "Add two numbers.\n\nStart from this code:\n```python\n"
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n```\n"
    )
    assert (plain.source, plain.verifier, plain.level) == ("apps", "code", "introductory")


def test_mbpp_prompt_shows_the_configured_number_of_tests(tmp_path: Path) -> None:
    settings = {"shown_tests": 1, "challenge_tests": True}
    (row,) = rows(tmp_path, "mbpp", MBPP, **settings)
    assert row.prompt == (
        "Write a function to add two numbers.\nThe code must pass these tests:\n"
        "```python\nassert add(1, 2) == 3\n```\n"
    )
    assert json.loads(row.answer) == {
        "asserts": [*MBPP["test_list"], "assert add(0, 0) == 0"],
        "setup": "",
    }
    sanitized = {"prompt": "Add.", "test_imports": ["import math"], "test_list": ["assert f(1)"]}
    (row,) = rows(tmp_path, "mbpp", sanitized, shown_tests=0, challenge_tests=True)
    assert (row.prompt, json.loads(row.answer)["setup"]) == ("Add.", "import math")
    with pytest.raises(ParamsError, match="shown_tests is -1"):
        found(preset("mbpp", tmp_path / "a.jsonl", shown_tests=-1, challenge_tests=False))


def test_humaneval_prompt_requests_the_whole_program(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "humaneval", DOUBLE)
    assert row.prompt == (
        "Complete this program. Give all of it, with its imports, in one block of Python.\n"
        f"```python\n{DOUBLE['prompt'].strip()}\n```\n"
    )
    assert (row.source, row.verifier, row.question) == ("humaneval", "code", DOUBLE["prompt"])


UNREADABLE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "apps": (
        {},
        [
            {**APPS, "input_output": "{"},
            {**APPS, "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
            {**APPS, "input_output": ""},
            {"question": "Add."},
        ],
    ),
    "mbpp": (
        {"shown_tests": 0, "challenge_tests": False},
        [
            {**MBPP, "test_list": ["assert add("]},
            {**MBPP, "test_imports": [{}]},
            {**MBPP, "test_list": []},
            {"text": "Add."},
        ],
    ),
    "humaneval": (
        {},
        [
            {**DOUBLE, "test": "assert double_all([]) == []"},
            {**DOUBLE, "test": "def check("},
            {**DOUBLE, "test": ""},
            {"prompt": DOUBLE["prompt"], "test": DOUBLE["test"]},
        ],
    ),
}
"""The settings of a preset, and rows whose last one lacks a field and the one before has no
tests."""


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_tests_are_rejected(tmp_path: Path, name: str) -> None:
    settings, bad = UNREADABLE[name]
    kept, rejected = found(preset(name, lines(tmp_path / "a.jsonl", *bad), **settings))
    assert kept == []
    reasons = [one.reason for one in rejected]
    assert reasons == ["malformed"] * (len(bad) - 2) + ["empty_answer", "missing_field"]


def test_only_the_solutions_of_the_rows_are_correct(tmp_path: Path) -> None:
    content = [
        *rows(tmp_path, "apps", APPS, CALLS),
        *rows(tmp_path, "mbpp", MBPP, shown_tests=0, challenge_tests=True),
        *rows(tmp_path, "humaneval", DOUBLE),
    ]
    right = [json.loads(row["solutions"])[0] for row in (APPS, CALLS)]
    right += [MBPP["code"], f"{DOUBLE['prompt']}{DOUBLE['canonical_solution']}"]
    wrong = ["print(3)", "class Solution:\n    def add(self, a, b): return 3"]
    wrong += ["def add(a, b): return 3", f"{DOUBLE['prompt']}    return []"]
    for row, solution, other in zip(content, right, wrong, strict=True):
        assert graded(solution, row.answer, sandbox="process").outcome == "correct"
        verdict = graded(other, row.answer, sandbox="process")
        assert verdict.outcome == "wrong"
        assert verdict.partial is not None
        assert 0 < verdict.partial < 1
