"""Assertions judged outside the sandbox: for `assert f(2) == [4]` the program evaluates `f(2)`, and
the comparison with `[4]` happens here, out of the program's reach.

This requires an assertion that consists of calls of the program's functions, literals, comparisons,
`and`, `or`, `not`, the four arithmetic operations, and a few Python functions on these (FUNCTIONS).
In `set(f(x)) == {1}` the program evaluates only `f(x)`. Any other statement (a loop, a variable, a
comprehension) must run in the program's process, where the program can read and defeat it.

Python evaluates the remaining assertion. At that point it contains no attributes and only calls of
FUNCTIONS, so a gold can run nothing else."""

import ast
import builtins
import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TYPES = (bool, dict, float, frozenset, int, list, set, str, tuple)
NAMES: dict[str, Any] = {kind.__name__: kind for kind in TYPES}
FUNCTIONS: dict[str, Callable[..., Any]] = NAMES | {
    one.__name__: one
    for one in (abs, all, any, math.isclose, len, max, min, round, sorted, sum, type)
}
SUPPORTED = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp,
    ast.Compare, ast.cmpop, ast.boolop, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd,
    ast.Not, ast.Load,
)  # fmt: skip
SINGLE = (None, True, False)  # operands of `is`: other values have no identity across processes


class Unsupported(ValueError):
    """Raised for an expression that can only be judged in the program's process."""


@dataclass(frozen=True)
class Assertion:
    """A statement of the tests. `test` is its condition, or None if the statement can only run in
    the program's process; `questions` are the calls, as text, that the program must evaluate."""

    source: str
    test: ast.expr | None
    questions: tuple[str, ...]

    def holds(self, answers: Mapping[str, Any]) -> bool:
        """Return whether the condition is true for these answers. Comparison errors propagate."""
        assert self.test is not None
        values = [answers[question] for question in self.questions]
        names = {f"answer_{place}": value for place, value in enumerate(values)}
        test = Evaluated(self.questions).visit(copy.deepcopy(self.test))
        code = compile(ast.fix_missing_locations(ast.Expression(test)), "<assertion>", "eval")
        scope = {"__builtins__": {}, **FUNCTIONS, "product": product, **names}
        return bool(eval(code, scope))  # nosec B307  # only SUPPORTED, see `collect`


class Evaluated(ast.NodeTransformer):
    """A transformer that replaces the program's calls with the names of their results,
    `math.isclose` with `isclose`, and `*` with `product`."""

    def __init__(self, questions: Sequence[str]) -> None:
        self.questions = questions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        question = ast.unparse(node)
        if question in self.questions:
            return ast.Name(f"answer_{self.questions.index(question)}", ast.Load())
        node.func = ast.Name(function_name(node) or "", ast.Load())
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        return ast.Call(ast.Name("product", ast.Load()), [node.left, node.right], [])


def product(left: Any, right: Any) -> Any:
    """Return the product of two numbers. Raise TypeError for anything else, because a repeated list
    could fill the memory."""
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise TypeError("only numbers are multiplied: a long list could fill the memory")
    return left * right


def read(source: str, helpers: Collection[str] = ()) -> list[Assertion]:
    """Return the statements of a text as Assertions. `helpers` are names defined by the tests, not
    by the program. `assert True` is skipped, because it tests nothing. Raise SyntaxError for text
    that is not Python."""
    found = (one for one in ast.parse(source).body if not holds_always(one))
    return [assertion(statement, helpers) for statement in found]


def holds_always(statement: ast.stmt) -> bool:
    """Return whether a statement asserts a true constant."""
    test = statement.test if isinstance(statement, ast.Assert) else None
    return isinstance(test, ast.Constant) and bool(test.value)


def assertion(statement: ast.stmt, helpers: Collection[str]) -> Assertion:
    """Convert a statement into an Assertion."""
    source = ast.unparse(statement)
    if not isinstance(statement, ast.Assert):
        return Assertion(source, None, ())
    # in `assert sum(10, 15) == 6`, `sum` is a function that the program defines
    called = (node for node in ast.walk(statement.test) if isinstance(node, ast.Call))
    own = next((function_name(node) for node in called), None)
    for name in (None, own):
        questions: list[str] = []
        try:
            collect(statement.test, questions, {*helpers}, name)
        except Unsupported:
            break
        if questions:
            return Assertion(source, statement.test, tuple(questions))
    return Assertion(source, None, ())


def collect(node: ast.AST, questions: list[str], helpers: set[str], own: str | None) -> None:
    """Append to `questions` a node's calls of the program's functions. `own` is a name in FUNCTIONS
    that the program may define. Raise Unsupported if a part must run in the program's process."""
    if isinstance(node, ast.Call) and function_name(node) in (None, own):
        check_question(node, helpers, own)
        questions.append(ast.unparse(node))
        return
    if isinstance(node, ast.Call):
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            collect(part, questions, helpers, own)
        return
    if isinstance(node, ast.Name) and node.id in NAMES:
        return
    if isinstance(node, ast.Compare) and not is_comparable(node):
        raise Unsupported("`is` compares identities")
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    if is_product and any(map(is_sequence, ast.iter_child_nodes(node))):
        raise Unsupported("a repeated sequence could fill the memory")
    if not isinstance(node, SUPPORTED):
        raise Unsupported(type(node).__name__)
    for child in ast.iter_child_nodes(node):
        collect(child, questions, helpers, own)


def is_sequence(node: ast.AST) -> bool:
    """Return whether an expression is a list, a tuple, or a string or bytes literal."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_text or isinstance(node, ast.List | ast.Tuple)


def check_question(node: ast.Call, helpers: set[str], own: str | None) -> None:
    """Raise Unsupported unless a call involves only the program: `f(1)`, `Solution().f(1)`.

    `equal(f(1), 2)` and `f(1).startswith("a")` contain the expected value, and the program could
    change their result."""
    function = node.func
    if isinstance(function, ast.Attribute):
        made = function.value
        is_object = isinstance(made, ast.Call) and isinstance(made.func, ast.Name)
        if not is_object or not made.func.id[:1].isupper():  # type: ignore[attr-defined]
            raise Unsupported("a method")
        function = made.func  # type: ignore[attr-defined]
    if not isinstance(function, ast.Name):
        raise Unsupported(type(function).__name__)
    is_builtin = hasattr(builtins, function.id) and function.id != own
    if is_builtin or function.id in helpers:
        raise Unsupported(f"{function.id} is not the program's")
    for part in (*node.args, *(keyword.value for keyword in node.keywords)):
        for inner in ast.walk(part):
            if isinstance(inner, ast.Call) and function_name(inner) in (None, own):
                raise Unsupported("a call within a call")


def function_name(node: ast.Call) -> str | None:
    """Return the name of the function in FUNCTIONS that a node calls, or None."""
    function = node.func
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return None
    if isinstance(function, ast.Name) and function.id in FUNCTIONS and function.id != "isclose":
        return function.id
    if isinstance(function, ast.Attribute) and ast.unparse(function) == "math.isclose":
        return "isclose"
    return None


def is_comparable(node: ast.Compare) -> bool:
    """Return whether every `is` in a comparison has a value of SINGLE on its right."""
    return all(
        isinstance(right, ast.Constant) and any(right.value is one for one in SINGLE)
        for how, right in zip(node.ops, node.comparators, strict=True)
        if isinstance(how, ast.Is | ast.IsNot)
    )
