"""The presets of programs, on rows made after the published columns: what they ask, and that the
verifier accepts the row's own solution and no other program."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.common.params import ParamsError
from tasks.grading.programs.golds import AssertTests, read_gold
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
FIRST: dict[str, Any] = {
    "task_id": "HumanEval/901",
    "prompt": ('\ndef first_word(text):\n    """Return the first word of a text, or None."""\n'),
    "canonical_solution": "    return next(iter(text.split()), None)\n",
    "entry_point": "first_word",
    "test": (
        "def check(candidate):\n\n    # Check some simple cases\n"
        '    assert True, "This prints if this assert fails 1 (good for debugging!)"\n'
        "    assert candidate('') is None, \"Test 1\"\n    assert candidate('a b') == 'a'\n\n"
        '    # Check some edge cases\n    assert True, "This prints if this assert fails 2"\n'
    ),
}
THIRD: dict[str, Any] = {
    "task_id": "HumanEval/902",
    "prompt": 'def third(x: float) -> float:\n    """Divide by three."""\n',
    "canonical_solution": "    return x / 3\n",
    "entry_point": "third",
    "test": (
        "def check(candidate):\n    assert abs(candidate(1.0) - 1.0/3.0) < 1e-6\n"
        "    assert abs(candidate(0.3) - 0.1) < 1e-6\n"
    ),
}


def rows(tmp_path: Path, name: str, *content: Any, **settings: Any) -> list[Row]:
    kept, rejected = found(preset(name, lines(tmp_path / "a.jsonl", *content), **settings))
    assert rejected == []
    return kept


def test_apps_asks_the_question_with_the_code_to_start_from(tmp_path: Path) -> None:
    plain, calls = rows(tmp_path, "apps", APPS, CALLS)
    assert plain.prompt == "Read two numbers and print their sum.\n"
    assert calls.prompt == (
        "Add two numbers.\n\nStart from this code:\n```python\n"
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n```\n"
    )
    assert (plain.source, plain.verifier, plain.level) == ("apps", "code", "introductory")


def test_tests_of_apps_that_cannot_be_read_are_rejected(tmp_path: Path) -> None:
    bad = [
        {**APPS, "input_output": "{"},
        {**APPS, "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
        {**APPS, "input_output": ""},
        {key: value for key, value in APPS.items() if key != "input_output"},
    ]
    kept, rejected = found(preset("apps", lines(tmp_path / "a.jsonl", *bad)))
    assert kept == []
    assert [one.reason for one in rejected] == [
        "malformed",
        "malformed",
        "empty_answer",
        "missing_field",
    ]
    assert "1 inputs and 0 outputs" in rejected[1].detail


def test_mbpp_shows_as_many_tests_as_it_is_told(tmp_path: Path) -> None:
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


def test_tests_of_mbpp_that_cannot_be_read_are_rejected(tmp_path: Path) -> None:
    bad = [{**MBPP, "test_list": ["assert add("]}, {**MBPP, "test_list": []}, {"text": "Add."}]
    path = lines(tmp_path / "a.jsonl", *bad)
    kept, rejected = found(preset("mbpp", path, shown_tests=0, challenge_tests=False))
    assert kept == []
    assert [one.reason for one in rejected] == ["malformed", "empty_answer", "missing_field"]


def test_humaneval_asks_for_the_whole_program(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "humaneval", DOUBLE)
    assert row.prompt == (
        "Complete this program. Give all of it, with its imports, in one block of Python.\n"
        f"```python\n{DOUBLE['prompt'].strip()}\n```\n"
    )
    assert (row.source, row.verifier, row.asked) == ("humaneval", "code", DOUBLE["prompt"])
    assert json.loads(row.answer) == {
        "asserts": ["assert double_all([]) == []", "assert double_all([3, -1]) == [6, -2]"],
        "setup": "",
    }


def test_tests_of_humaneval_that_cannot_be_read_are_rejected(tmp_path: Path) -> None:
    bad = [
        {**DOUBLE, "test": "assert double_all([]) == []"},
        {**DOUBLE, "test": "def check("},
        {**DOUBLE, "test": ""},
        {"prompt": DOUBLE["prompt"], "test": DOUBLE["test"]},
    ]
    kept, rejected = found(preset("humaneval", lines(tmp_path / "a.jsonl", *bad)))
    assert kept == []
    reasons = ["malformed", "malformed", "empty_answer", "missing_field"]
    assert [one.reason for one in rejected] == reasons


def holds(program: str, gold: str) -> bool:
    """Whether a program that can be trusted passes all tests, which are judged from its answers."""
    tests = read_gold(gold)
    assert isinstance(tests, AssertTests)
    names: dict[str, Any] = {}
    exec(program, names)
    return all(
        one.holds({question: eval(question, names) for question in one.questions})
        for one in tests.statements
    )


def test_assertions_of_humaneval_are_judged_outside_the_program(tmp_path: Path) -> None:
    content = [DOUBLE, FIRST, THIRD]
    for row, source in zip(rows(tmp_path, "humaneval", *content), content, strict=True):
        assert holds(f"{source['prompt']}{source['canonical_solution']}", row.answer)
        assert not holds(f"{source['prompt']}    return 7", row.answer)


@pytest.mark.sandbox
def test_solutions_of_humaneval_pass_and_other_programs_do_not(tmp_path: Path) -> None:
    content = [DOUBLE, FIRST, THIRD]
    for row, source in zip(rows(tmp_path, "humaneval", *content), content, strict=True):
        right = f"{source['prompt']}{source['canonical_solution']}"
        assert graded(right, row.answer).outcome == "correct"
        assert graded(f"{source['prompt']}    return 7", row.answer).outcome == "wrong"


@pytest.mark.sandbox
def test_the_solutions_of_the_rows_are_correct_and_other_programs_are_not(tmp_path: Path) -> None:
    solutions = [json.loads(row["solutions"])[0] for row in (APPS, CALLS)]
    wrong = ["print(3)", "class Solution:\n    def add(self, a, b): return 3"]
    apps = rows(tmp_path, "apps", APPS, CALLS)
    mbpp = rows(tmp_path, "mbpp", MBPP, shown_tests=0, challenge_tests=True)
    right = [*solutions, MBPP["code"]]
    for row, program in zip([*apps, *mbpp], right, strict=True):
        assert graded(program, row.answer).outcome == "correct"
    for row, program in zip([*apps, *mbpp], [*wrong, "def add(a, b): return 3"], strict=True):
        verdict = graded(program, row.answer)
        assert verdict.outcome == "wrong"
        assert verdict.partial is not None
        assert 0 < verdict.partial < 1
