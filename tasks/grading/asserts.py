"""Assertions judged outside the sandbox: `assert f(2) == [4]` becomes the question what `f(2)` is,
and a comparison with `[4]` of which the program learns nothing.

An assertion can be judged so where it is made of calls of the program's functions, literals,
comparisons, `and`, `or`, `not`, the four operations, and a few of Python's own functions on these
(FUNCTIONS). Of `set(f(x)) == {1}` only `f(x)` is asked of the program. Any other statement (a loop,
a variable, a comprehension) has to run beside the program, which can then read and defeat it."""

import ast
import builtins
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "all": all,
    "any": any,
    "bool": bool,
    "dict": dict,
    "float": float,
    "frozenset": frozenset,
    "int": int,
    "isclose": math.isclose,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "round": round,
    "set": set,
    "sorted": sorted,
    "str": str,
    "sum": sum,
    "tuple": tuple,
    "type": type,
}
NAMES: dict[str, Any] = {
    name: FUNCTIONS[name]
    for name in ("bool", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SINGLE = (None, True, False)  # what `is` may be asked of: others have no identity across processes


SUPPORTED = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp,
    ast.Compare, *OPERATIONS, ast.USub, ast.UAdd, ast.Not, ast.And, ast.Or, ast.Load,
    *COMPARISONS,
)  # fmt: skip


class Unsupported(ValueError):
    """The expression has a part that is not judged outside."""


@dataclass(frozen=True)
class Assertion:
    """A statement that holds or not. `questions` are the calls that the program must answer, each
    as an expression; without `test` the statement can only be executed beside the program. `own` is
    a name of FUNCTIONS that the program defines itself."""

    source: str
    test: ast.expr | None
    questions: tuple[str, ...]
    own: str | None = None

    def holds(self, answers: Mapping[str, Any]) -> bool:
        """Whether the assertion is true of these answers. Raises what comparing them raises."""
        assert self.test is not None
        return bool(evaluate(self.test, answers))


def read(source: str, helpers: Collection[str] = ()) -> list[Assertion]:
    """Return the statements of a text, one by one. `helpers` are names that the tests define:
    calling them judges and does not ask. `assert True` is left out: it tests nothing. Raises
    SyntaxError for what is not Python."""
    found = (one for one in ast.parse(source).body if not holds_always(one))
    return [assertion(statement, helpers) for statement in found]


def holds_always(statement: ast.stmt) -> bool:
    """Whether a statement is the assertion of a true constant."""
    test = statement.test if isinstance(statement, ast.Assert) else None
    return isinstance(test, ast.Constant) and bool(test.value)


def assertion(statement: ast.stmt, helpers: Collection[str]) -> Assertion:
    """Return a statement as an assertion."""
    source = ast.unparse(statement)
    if not isinstance(statement, ast.Assert):
        return Assertion(source, None, ())
    # `assert sum(10, 15) == 6` is of a function that the program defines under that name
    called = (node for node in ast.walk(statement.test) if isinstance(node, ast.Call))
    own = next((function_name(node) for node in called), None)
    for name in (None, own):
        questions: list[str] = []
        try:
            collect(statement.test, questions, {*helpers}, name)
        except Unsupported:
            break
        if questions:
            return Assertion(source, statement.test, tuple(questions), name)
    return Assertion(source, None, ())


def collect(node: ast.AST, questions: list[str], helpers: set[str], own: str | None) -> None:
    """Add the calls of the program's functions in an expression. Raises Unsupported for a part that
    is not judged outside."""
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
    if isinstance(node, ast.Compare) and not all(map(is_comparable, operands_of(node))):
        raise Unsupported("`is` asks for an identity")
    if not isinstance(node, SUPPORTED):
        raise Unsupported(type(node).__name__)
    for child in ast.iter_child_nodes(node):
        collect(child, questions, helpers, own)


def check_question(node: ast.Call, helpers: set[str], own: str | None) -> None:
    """Raise Unsupported unless a call asks the program alone: `f(1)`, `Solution().f(1)`.

    `equal(f(1), 2)` and `f(1).startswith("a")` judge where the program can change the judgement,
    and contain what is expected."""
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
    """Return the name of the function of FUNCTIONS that a node calls, or None."""
    function = node.func
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return None
    if isinstance(function, ast.Name) and function.id in FUNCTIONS and function.id != "isclose":
        return function.id
    if isinstance(function, ast.Attribute) and ast.unparse(function) == "math.isclose":
        return "isclose"
    return None


def operands_of(node: ast.Compare) -> list[tuple[ast.cmpop, ast.expr]]:
    """Return each operator of a comparison with what stands on its right."""
    return list(zip(node.ops, node.comparators, strict=True))


def is_comparable(operand: tuple[ast.cmpop, ast.expr]) -> bool:
    """Whether a comparison means the same outside."""
    how, right = operand
    if not isinstance(how, ast.Is | ast.IsNot):
        return True
    return isinstance(right, ast.Constant) and any(right.value is one for one in SINGLE)


def evaluate(node: ast.expr, answers: Mapping[str, Any]) -> Any:
    """Return the value of an expression that `collect` accepted."""
    if isinstance(node, ast.Call) and (question := ast.unparse(node)) in answers:
        return answers[question]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return NAMES[node.id]
    if isinstance(node, ast.Call):
        function = FUNCTIONS[function_name(node) or ""]
        arguments = [evaluate(argument, answers) for argument in node.args]
        named = {str(word.arg): evaluate(word.value, answers) for word in node.keywords}
        return function(*arguments, **named)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return kind(evaluate(item, answers) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {
            evaluate(key, answers): evaluate(value, answers)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return combined(node, answers)


def combined(node: ast.expr, answers: Mapping[str, Any]) -> Any:
    """Return the value of an expression with an operator."""
    if isinstance(node, ast.UnaryOp):
        value = evaluate(node.operand, answers)
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) else +value
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left, answers), evaluate(node.right, answers)
        if isinstance(node.op, ast.Mult) and not (is_number(left) and is_number(right)):
            raise TypeError("only numbers are multiplied: a long list could fill the memory")
        return OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.BoolOp):
        decisive = isinstance(node.op, ast.Or)  # the value that ends the evaluation
        found = any(bool(evaluate(part, answers)) is decisive for part in node.values)
        return found is decisive
    assert isinstance(node, ast.Compare)
    left = evaluate(node.left, answers)
    for how, part in operands_of(node):
        right = evaluate(part, answers)
        if not COMPARISONS[type(how)](left, right):
            return False
        left = right
    return True


def is_number(value: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(value, int | float)
