"""Tests of programs: the normal form of golds, and the conversion of published forms.

A gold of the verifier `code` is JSON text in one of three forms, as published in APPS (arXiv
2105.09938), TACO, LiveCodeBench, MBPP (arXiv 2108.07732) and HumanEval (arXiv 2107.03374):

    {"stdin_stdout": {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}}
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    {"asserts": ["assert add(1, 2) == 3"], "setup": "import math"}

or a script: assertions on separate lines, preceded by their imports and functions.

A gold of the second form may have `"wrapped": true`: then an expected list also stands for its
first element, as in APPS's own grader, because APPS writes 3 as [3] in some rows and as 3 in
others. Output is compared line by line, ignoring white space at the ends of lines and empty lines
at the end. Return values of functions are compared as JSON: a tuple is a list, and keys of mappings
are text (see `results`). Not supported: problems with many correct answers, which need a program as
a judge; files; several programs at once."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.grading.programs import asserts
from tasks.grading.programs.asserts import Assertion
from tasks.grading.programs.sandbox import FILE_BYTES


@dataclass(frozen=True)
class StdinTests:
    """Texts for standard input, and the expected outputs."""

    inputs: list[str]
    outputs: list[str]


@dataclass(frozen=True)
class CallTests:
    """Arguments of a function, and the expected return values."""

    function: str
    inputs: list[list[Any]]
    outputs: list[Any]
    wrapped: bool


@dataclass(frozen=True)
class AssertTests:
    """Statements that must hold after `setup` has run."""

    setup: str
    statements: list[Assertion]


Tests = StdinTests | CallTests | AssertTests


def read_gold(answer: str) -> Tests:
    """Return the tests of a gold. Raise ValueError with the reason if the gold is invalid."""
    if not answer.lstrip().startswith(("{", "[")):
        return read_script(answer)
    gold = json.loads(answer)
    if not isinstance(gold, dict):
        raise ValueError(f"the gold is {type(gold).__name__}, not an object of tests")
    if "stdin_stdout" in gold:
        inner = gold["stdin_stdout"]
        inputs, outputs = pairs(inner if isinstance(inner, dict) else {})
        if not all(isinstance(text, str) for text in [*inputs, *outputs]):
            raise ValueError("the gold's inputs and outputs of `stdin_stdout` must be text")
        if (longest := max(len(text.encode()) for text in [*inputs, *outputs])) > FILE_BYTES:
            raise ValueError(f"a test has {longest} bytes; the sandbox takes {FILE_BYTES}")
        return StdinTests(inputs, outputs)
    if "fn_name" in gold:
        inputs, outputs = pairs(gold)
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError("every input of a function must be the list of its arguments")
        if not isinstance(gold["fn_name"], str) or not gold["fn_name"].isidentifier():
            raise ValueError(f"`fn_name` is {gold['fn_name']!r}, which names no function")
        return CallTests(gold["fn_name"], inputs, outputs, gold.get("wrapped") is True)
    if "asserts" in gold:
        return read_asserts(gold["asserts"], gold.get("setup", ""))
    raise ValueError("the gold has none of the keys `stdin_stdout`, `fn_name`, `asserts`")


def pairs(gold: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the inputs and outputs. Raise ValueError for empty lists or different lengths."""
    inputs, outputs = gold.get("inputs"), gold.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("the gold needs lists `inputs` and `outputs`")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"the gold has {len(inputs)} inputs and {len(outputs)} outputs")
    return inputs, outputs


def read_asserts(statements: Any, setup: Any) -> AssertTests:
    """Return the assertions, one test each. Raise ValueError if there are none."""
    if not isinstance(setup, str) or not isinstance(statements, list) or not statements:
        raise ValueError("the gold needs a list `asserts`, and `setup` must be text")
    try:
        helpers = defined_in(setup)
        found = [one for text in statements for one in asserts.read(str(text), helpers)]
    except SyntaxError as error:
        raise ValueError(f"an assertion or the setup is not Python: {error}") from error
    if not found:
        raise ValueError("the gold's `asserts` contain no statement")
    return AssertTests(setup, found)


def read_script(script: str) -> AssertTests:
    """Return the tests in a script: its statements from the first assertion on, with the code
    before it as setup. Raise ValueError if there is no assertion."""
    try:
        body = ast.parse(script).body
    except SyntaxError as error:
        raise ValueError(f"the gold is neither JSON nor a script of assertions: {error}") from error
    kinds = [isinstance(one, ast.Assert) for one in body]
    if True not in kinds:
        raise ValueError("the gold is neither JSON nor a script of assertions: it has none")
    first = kinds.index(True)
    setup = ast.unparse(ast.Module(body[:first], []))
    return read_asserts([ast.unparse(one) for one in body[first:]], setup)


def defined_in(setup: str) -> set[str]:
    """Return the names of the functions and classes that a setup defines, and of its imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def gold_of_apps(input_output: str | Mapping[str, Any]) -> str:
    """Return the gold of a row of APPS, TACO, Eurus, DeepCoder or LiveCodeBench: a mapping (or its
    JSON text) of `inputs`, `outputs` and, for calls, `fn_name`.

    Inputs of calls are lists of arguments (APPS), or text with one JSON argument per line
    (LiveCodeBench, with outputs in JSON text too). Texts given as lists of lines are joined. Raise
    ValueError for any other form."""
    tests = json.loads(input_output) if isinstance(input_output, str) else dict(input_output)
    if not isinstance(tests, dict):
        raise ValueError("the tests are not a mapping of inputs and outputs")
    inputs, outputs = pairs(tests)
    name = tests.get("fn_name")
    if not name:
        texts = {"inputs": [*map(joined, inputs)], "outputs": [*map(joined, outputs)]}
        return normal({"stdin_stdout": texts})
    if all(isinstance(text, str) for text in inputs):
        arguments = [
            [json.loads(line) for line in text.splitlines() if line.strip()] for text in inputs
        ]
        results = [json.loads(text) if isinstance(text, str) else text for text in outputs]
        return normal({"fn_name": name, "inputs": arguments, "outputs": results})
    return normal({"fn_name": name, "inputs": inputs, "outputs": outputs, "wrapped": True})


def gold_of_mbpp(test_list: Sequence[str], test_setup_code: str | None) -> str:
    """Return the gold of an MBPP row: assertions and setup. Raise ValueError without assertions."""
    return normal({"asserts": [str(text) for text in test_list], "setup": test_setup_code or ""})


def gold_of_humaneval(test: str, entry_point: str) -> str:
    """Return the gold of a row of HumanEval: the assertions of `check(candidate)`, with `candidate`
    replaced by the name of the function.

    A `check` that contains more than assertions (a loop, a variable) becomes a single test: a call
    of `check`. Raise ValueError without a `check`."""
    try:
        tree = ast.parse(test)
    except SyntaxError as error:
        raise ValueError(f"`test` is not Python: {error}") from error
    check = next(
        (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "check"), None
    )
    if check is None or len(check.args.args) != 1:
        raise ValueError("`test` has no function `check(candidate)`")
    before = [one for one in tree.body if one is not check and not is_metadata(one)]
    body = [one for one in check.body if not isinstance(one, ast.Expr | ast.Pass)]
    if not body or not all(isinstance(one, ast.Assert) for one in body):
        setup = ast.unparse(ast.Module([*before, check], []))
        return normal({"asserts": [f"check({entry_point})"], "setup": setup})
    candidate = check.args.args[0].arg
    for node in ast.walk(check):
        if isinstance(node, ast.Name) and node.id == candidate:
            node.id = entry_point
    statements = [ast.unparse(one) for one in body]
    return normal({"asserts": statements, "setup": ast.unparse(ast.Module(before, []))})


def is_metadata(statement: ast.stmt) -> bool:
    """Return whether a statement is HumanEval's `METADATA = {...}`."""
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "METADATA"


def normal(gold: dict[str, Any]) -> str:
    """Validate a gold, and return it as normalised JSON text. Raise ValueError if it is invalid."""
    text = json.dumps(gold, ensure_ascii=False, sort_keys=True)
    read_gold(text)
    return text


def joined(value: Any) -> str:
    """Return a value as text, with the lines of a list joined."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)
