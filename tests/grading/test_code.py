"""The verifier `code`: golds, blocks, comparisons, and verdicts on honest programs."""

import json
from typing import Any

import pytest

from tasks.common.params import ParamsError
from tasks.grading.loading import load
from tasks.grading.programs import results
from tasks.grading.programs.asserts import read
from tasks.grading.programs.blocks import last_block
from tasks.grading.programs.golds import (
    AssertTests,
    gold_of_apps,
    gold_of_humaneval,
    gold_of_mbpp,
    read_gold,
)
from tasks.grading.verdict import Verdict
from tasks.grading.verifiers.code import LANGUAGES

SETTINGS: dict[str, Any] = {
    "method": "code",
    "language": "python",
    "sandbox": "bubblewrap",
    "seconds": 2.0,
    "total_seconds": 30.0,
    "memory_mb": 512,
    "packages": False,
    "prelude": "from typing import *",
    "float_tolerance": None,
    "other_asserts": "refuse",
    "stop_at_failure": False,
}

ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [3, 0]})
SUM = json.dumps({"stdin_stdout": {"inputs": ["1 2\n", "5 -7\n"], "outputs": ["3\n", "-2\n"]}})
ASSERTS = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], "setup": ""})


def graded(program: str, gold: str, **changes: Any) -> Verdict:
    """Return the verdict on a completion that consists of the program."""
    verify = load("x", {"x": {**SETTINGS, **changes}}).verify
    return verify(f"So:\n```python\n{program}\n```\n", gold)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```\nx = 1\n```", "x = 1\n"),
        ("~~~py\nx = 1\n~~~", "x = 1\n"),
        ("```python\nx = 1\n```\nor better\n```Python3\nx = 2\n```\ndone", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```text\n1\n```", "x = 1\n"),
        ("1. so\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\nx = 1\n", None),
        ("x = 1", None),
        ("```bash\nls\n```", None),
    ],
)
def test_last_closed_block_of_python_is_the_program(text: str, block: str | None) -> None:
    assert last_block(text, LANGUAGES) == block


@pytest.mark.parametrize(
    ("given", "wanted", "tolerance", "same"),
    [
        ("3  \n4\t\n\n\n", "3\n4\n", None, True),
        (" 3", "3", None, False),
        ("3\n\n4", "3\n4", None, False),
        ("3 4", "3  4", None, False),
        ("3.0", "3", None, False),
        ("3.0", "3", 1e-6, True),
        ("x 0.333333", "x  0.3333334", 1e-6, True),
        ("0.3333", "0.3334", 1e-6, False),
        ("nan", "nan", 1e-6, True),
        ("1_0", "10", 1e-6, False),
        ("", "0", 1e-6, False),
        ("1" * 10**6 + "x", "2", 1e-6, False),
        ("1.5e3 -2.", "1500 -2", 1e-6, True),
    ],
)
def test_outputs_are_compared_line_by_line(
    given: str, wanted: str, tolerance: float | None, same: bool
) -> None:
    assert results.same_output(given, wanted, tolerance) is same


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("seven", "neither JSON nor"),
        ("[1]", "list, not an object"),
        ("{}", "none of the keys"),
        ('{"fn_name": "f", "inputs": [[1]], "outputs": []}', "1 inputs and 0 outputs"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [1]}', "list of its arguments"),
        ('{"fn_name": "f(", "inputs": [[1]], "outputs": [1]}', "names no function"),
        ('{"stdin_stdout": {"inputs": [1], "outputs": ["1"]}}', "must be text"),
        ('{"stdin_stdout": {"inputs": [], "outputs": []}}', "0 inputs"),
        ('{"asserts": []}', "needs a list `asserts`"),
        ('{"asserts": ["assert f("]}', "not Python"),
        ('{"asserts": ["check(f)"], "setup": ""}', "could defeat it"),
        ('{"asserts": ["assert f(3) == [0] * 3"]}', "could defeat it"),
        ('{"asserts": ["assert f(3) == 2 * \'ab\'"]}', "could defeat it"),
    ],
)
def test_error_for_an_unreadable_gold_names_the_fault(gold: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load("x", {"x": {**SETTINGS, "sandbox": "process"}}).verify("```\npass\n```", gold)


@pytest.mark.parametrize(
    ("source", "questions", "answers", "holds"),
    [
        ("assert f(1) == [2]", ["f(1)"], [(2,)], False),
        ("assert 3 == f('a', b=2), 'message'", ["f('a', b=2)"], [3], True),
        ("assert set(f([1])) == set([1, 2])", ["f([1])"], [[2, 1, 1]], True),
        ("assert not f(1)", ["f(1)"], [0], True),
        ("assert f(1) is None", ["f(1)"], [None], True),
        ("assert f(1) is True and f(2) is False", ["f(1)", "f(2)"], [True, True], False),
        ("assert math.isclose(f(1), 2.5, rel_tol=0.01)", ["f(1)"], [2.51], True),
        ("assert Solution().f(1) == 1", ["Solution().f(1)"], [1], True),
        ("assert 1 < f(1) <= 3", ["f(1)"], [3], True),
        ("assert type(f(1)) == int", ["f(1)"], [True], False),
        ("assert sum(10, 15) == 6", ["sum(10, 15)"], [6], True),
        ("assert f(-1) in (1, 2)", ["f(-1)"], [2], True),
        ("assert abs(f(1) - 2.0/3.0) < 1e-6", ["f(1)"], [0.6666667], True),
        ("assert f(1) == 3 * 8", ["f(1)"], [24], True),
    ],
)
def test_only_calls_of_an_assertion_are_evaluated_by_the_program(
    source: str, questions: list[str], answers: list[Any], holds: bool
) -> None:
    [assertion] = read(source)
    assert list(assertion.questions) == questions
    assert assertion.holds(dict(zip(questions, answers, strict=True))) is holds


def test_returned_list_is_not_multiplied() -> None:
    [assertion] = read("assert f(1) * 1000 == 2")
    with pytest.raises(TypeError, match="only numbers are multiplied"):
        assertion.holds({"f(1)": [0] * 1000})


@pytest.mark.parametrize(
    "source",
    [
        "assert equal(f(1), 2)",
        "assert isinstance(f(1), int)",
        "assert isclose(*[f(1), 2.0])",
        "assert f(1).startswith('a')",
        "assert np.allclose(f(1), 2.0)",
        "assert helper(2)",
        "assert all(f(x) == 2 for x in (1, 2))",
        "assert f(1) is 1000",
        "assert f(x)(2) == 1",
        "assert x == 1",
        "x = f(1)",
    ],
)
def test_expression_with_the_expected_value_is_not_evaluated_inside(source: str) -> None:
    [assertion] = read(source, {"helper", "np"})
    assert assertion.test is None


def test_golds_of_published_forms() -> None:
    stdin = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
    assert json.loads(gold_of_apps(json.dumps(stdin))) == {
        "stdin_stdout": {"inputs": ["1 2\n", "3\n4"], "outputs": ["3\n", "7"]}
    }
    livecodebench = {"fn_name": "add", "inputs": ['[1, 2]\n"a"\n'], "outputs": ["[3]"]}
    assert json.loads(gold_of_apps(livecodebench)) == {
        "fn_name": "add",
        "inputs": [[[1, 2], "a"]],
        "outputs": [[3]],
    }
    idle = (
        "def check(candidate):\n    assert True, 'x'\n    assert candidate(1) == 2\n    assert 1\n"
    )
    tests = read_gold(gold_of_humaneval(idle, "f"))
    assert isinstance(tests, AssertTests)
    assert [one.questions for one in tests.statements] == [("f(1)",)]
    with pytest.raises(ValueError, match="contain no statement"):
        gold_of_humaneval("def check(candidate):\n    assert True\n", "f")
    with pytest.raises(ValueError, match="no function `check"):
        gold_of_humaneval("assert f(1) == 2", "f")


def test_script_of_assertions_is_a_gold() -> None:
    tests = read_gold("import math\n\nassert f(1) == 2\nassert f(4) == 5, 'no'\n")
    assert isinstance(tests, AssertTests)
    assert tests.setup == "import math"
    assert [one.questions for one in tests.statements] == [("f(1)",), ("f(4)",)]
    for bad, message in (("import math", "it has none"), ("4 apples", "neither JSON")):
        with pytest.raises(ValueError, match=message):
            read_gold(bad)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "gold", "outcome", "partial", "detail"),
    [
        ("def add(a, b):\n    return a + b", ADD, "correct", 1.0, "2 tests"),
        ("class Solution:\n    def add(self, a: List, b): return a + b", ADD, "correct", 1.0, ""),
        ("def add(a, b): return 3", ADD, "wrong", 0.5, "test 2 of 2: wrong answer: 3, not 0"),
        ("def add(a, b): return a / 0", ADD, "wrong", 0.0, "ZeroDivisionError"),
        ("def plus(a, b): return a + b", ADD, "wrong", 0.0, "exception: KeyError: 'add'"),
        ("def add(a, b) return", ADD, "wrong", 0.0, "SyntaxError"),
        ("raise ValueError('no')", ADD, "wrong", 0.0, "ValueError: no"),
        ("print(sum(map(int, input().split())))", SUM, "correct", 1.0, ""),
        ("import sys\nprint(sum(map(int, open(0).read().split())))", SUM, "correct", 1.0, ""),
        ("print(sum(map(int, open('/dev/stdin').read().split())))", SUM, "correct", 1.0, ""),
        ("if __name__ == '__main__':\n    print(3)", SUM, "wrong", 0.5, "test 2 of 2: wrong"),
        ("print(3)\nraise SystemExit", SUM, "wrong", 0.5, "wrong answer: 3\\n, not -2\\n"),
        ("print(3)\nexit(1)", SUM, "wrong", 0.0, "status 1"),
        ("print(x)", SUM, "wrong", 0.0, "NameError"),
        ("def add(a, b): return a + b", ASSERTS, "correct", 1.0, ""),
        ("def add(a, b): return 3", ASSERTS, "wrong", 0.5, "assert add(2, 2) == 4"),
    ],
)
def test_verdicts_on_programs(
    program: str, gold: str, outcome: str, partial: float, detail: str
) -> None:
    verdict = graded(program, gold)
    assert (verdict.outcome, verdict.partial) == (outcome, partial)
    assert detail in verdict.answer


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("result", "wanted", "outcome"),
    [
        ("(1, [2, (3,)])", [1, [2, [3]]], "correct"),
        ("{1: 'a'}", {"1": "a"}, "correct"),
        ("{1, 2}", [1, 2], "wrong"),
        ("2 ** 200", 2**200, "correct"),
        ("iter([1])", [1], "wrong"),
        ("float('inf')", 1, "wrong"),
        ("'\\ud800'", "?", "wrong"),
        ("3", [3], "wrong"),
        ("__import__('collections').Counter('aab')", {"a": 2, "b": 1}, "correct"),
    ],
)
def test_results_are_compared_as_json(result: str, wanted: Any, outcome: str) -> None:
    gold = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [wanted]})
    assert graded(f"def f(): return {result}", gold).outcome == outcome


@pytest.mark.sandbox
def test_expected_list_of_apps_may_equal_its_first_element() -> None:
    gold = gold_of_apps({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]})
    assert graded("def f(x): return x + 1", gold).outcome == "correct"
    assert graded("def f(x): return [x + 1]", gold).outcome == "correct"
    assert graded("def f(x): return x", gold).outcome == "wrong"


@pytest.mark.sandbox
def test_tolerance_applies_to_results_and_outputs() -> None:
    gold = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [[0.3, "a"]]})
    program = "def f(): return [0.1 + 0.2, 'a']"
    assert graded(program, gold).outcome == "wrong"
    assert graded(program, gold, float_tolerance=1e-9).outcome == "correct"


@pytest.mark.sandbox
def test_other_assertions_run_in_the_program_if_allowed() -> None:
    test = (
        "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i * 2\n"
        "    assert candidate(10) == 20\n"
    )
    gold = gold_of_humaneval(test, "double")
    right, wrong = "def double(x): return 2 * x", "def double(x): return 2 * (x % 3)"
    assert graded(right, gold, other_asserts="run").outcome == "correct"
    verdict = graded(wrong, gold, other_asserts="run")
    assert (verdict.outcome, "AssertionError" in verdict.answer) == ("wrong", True)


@pytest.mark.sandbox
def test_setup_runs_after_the_program_and_before_the_assertions() -> None:
    gold = gold_of_mbpp(["assert depth(root) == 2"], "root = Node(Node(None))")
    program = (
        "class Node:\n    def __init__(self, next): self.next = next\n"
        "def depth(node): return 0 if node is None else 1 + depth(node.next)"
    )
    assert graded(program, gold).outcome == "correct"


@pytest.mark.sandbox
def test_tests_continue_after_one_that_stops_the_program() -> None:
    gold = json.dumps({"fn_name": "f", "inputs": [[0], [1], [2], [3]], "outputs": [0, 1, 2, 3]})
    program = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    return x"
    verdict = graded(program, gold)
    assert (verdict.partial, verdict.answer) == (
        0.75,
        "test 2 of 4: it ended without a result",
    )
    assert graded(program, gold, stop_at_failure=True).partial == 0.25


@pytest.mark.sandbox
def test_program_may_have_many_tests() -> None:
    numbers = range(70)  # more than the number of files that a process may open
    texts = {"inputs": [f"{i}\n" for i in numbers], "outputs": [f"{i + 1}\n" for i in numbers]}
    verdict = graded("print(int(input()) + 1)", json.dumps({"stdin_stdout": texts}))
    assert (verdict.outcome, verdict.answer) == ("correct", "70 tests passed")


@pytest.mark.sandbox
def test_total_time_of_all_tests_is_limited() -> None:
    gold = json.dumps({"fn_name": "f", "inputs": [[0]] * 50, "outputs": [0] * 50})
    verdict = graded("import time\ndef f(x): time.sleep(1); return x", gold, total_seconds=2.5)
    assert verdict.outcome == "wrong"
    assert verdict.partial is not None
    assert 0 < verdict.partial <= 2 / 50


@pytest.mark.sandbox
def test_packages_can_be_imported_only_if_configured() -> None:
    gold = json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [[1, 1]]})
    program = "import numpy\ndef f(x): return numpy.ones(x, int)"
    assert "ModuleNotFoundError" in graded(program, gold).answer
    assert graded(program, gold, packages=True, memory_mb=1024).outcome == "correct"


def test_broken_sandbox_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ParamsError, match=r"not installed.*apt-get install bubblewrap"):
        load("x", {"x": {**SETTINGS, "memory_mb": 999}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0.0}, "set 0 < seconds <= total_seconds"),
        ({"seconds": 31.0}, "set 0 < seconds <= total_seconds"),
        ({"memory_mb": 0}, "memory_mb is 0"),
        ({"memory_mb": 1, "sandbox": "process"}, "'process' does not work here"),
        ({"language": "c"}, "language is 'c'; allowed: python"),
        ({"prelude": "import none", "sandbox": "process"}, "'import none' does not run: .*'none'"),
    ],
)
def test_invalid_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        load("x", {"x": {**SETTINGS, **change}})
