"""`countdown`: an arithmetic expression that uses every given number exactly once and equals the
target.

The gold is the JSON text {"numbers": [6, 34, 1, 11], "target": 17}. The expression is in tags, in a
box, or on the last line with a digit; text after an equals sign is ignored. It is parsed as a
syntax tree of numbers, brackets and the four operations, and evaluated in exact fractions; nothing
is executed."""

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from tasks.grading.answers.marked import marked_answer
from tasks.grading.verdict import Verdict

ANSWERS = True
canonical_completion = None  # a target has many solutions, and the gold contains none

MAX_LENGTH = 1000  # characters of an expression
SIGNS = str.maketrans(
    {"×": "*", "·": "*", "÷": "/", "−": "-", "[": "(", "]": ")", "{": "(", "}": ")"}
)
LATEX = {
    r"\times": "*", r"\cdot": "*", r"\div": "/",
    r"\left": "", r"\right": "", "$": "", r"\(": "", r"\)": "",
}  # fmt: skip
OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def verify(completion: str, answer: str) -> Verdict:
    """Return `correct`, `wrong`, or `unparsed` if there is no arithmetic expression. A gold in
    another form is an `error`."""
    gold = json.loads(answer)
    numbers = sorted(map(Fraction, gold["numbers"]))
    target = Fraction(gold["target"])
    expression = find_expression(completion)
    try:
        value, used = evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Verdict("unparsed", expression)
    except ZeroDivisionError:
        return Verdict("wrong", expression)
    correct = value == target and sorted(used) == numbers
    return Verdict("correct" if correct else "wrong", expression)


def find_expression(text: str) -> str:
    """Return the completion's expression, converted to Python's operators; an empty string if there
    is none, or if it has more than MAX_LENGTH characters."""
    lines = marked_answer(text)[-10 * MAX_LENGTH :].splitlines()
    line = next((line for line in reversed(lines) if re.search(r"\d", line)), "")
    for latex, sign in LATEX.items():
        line = line.replace(latex, sign)
    expression = re.sub(r"^[^\d(.+-]*:", "", line.translate(SIGNS)).split("=")[0].strip()
    return expression if len(expression) <= MAX_LENGTH else ""


def evaluate(node: ast.expr) -> tuple[Fraction, list[Fraction]]:
    """Return the value and the numbers of a tree. Raise ValueError for anything except numbers,
    signs, the four operations and brackets, and ZeroDivisionError for a division by 0."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value)), [Fraction(str(node.value))]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value, used = evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value, used
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(f"{type(node).__name__} is not arithmetic")
    left, used = evaluate(node.left)
    right, more = evaluate(node.right)
    return OPERATORS[type(node.op)](left, right), used + more
