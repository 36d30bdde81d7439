r"""Convert mathematics into sympy expressions, and compare these. LaTeX is parsed by math-verify's
parser, Python notation through a syntax tree (nothing is executed).

Units, which math-verify's parser removes by default, are kept, so `5-5c` is not 0."""

import ast
import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.antlr_parser import PSParser
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import verify as library_equal
from math_verify.parser import parse_latex_cached

from tasks.grading.answers import numbers
from tasks.grading.answers.golds import pairs_up
from tasks.grading.answers.numbers import Tolerance

if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    # The library's grammar for antlr 4.9 (which DVC's hydra pins) does not have this rule, but its
    # parser calls it, so every percentage in LaTeX would fail.
    PSParser.AtomContext.FUNC_GAMMA = lambda self: None

NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
DECIMALS = 12  # precision of decimals inside sets, tuples and intervals
DIGITS = 60  # of numeric evaluation
MAX_DIGITS = 10_000  # more of them for a large number
SAME = sympy.Float("1e-50")  # maximum relative difference of equal numbers, if one is irrational
LAZY = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
LAZY_DIGITS = 20
LAZY_SAME = sympy.Float("1e-12")
MAX_BITS = 100_000  # of an exactly calculated number
MAX_LATEX = 2000  # characters
KNOWN = (
    "sqrt", "cbrt", "root", "exp", "log", "sin", "cos", "tan", "cot",
    "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs",
    "gamma", "factorial", "binomial", "floor", "ceiling", "Rational", "Integer", "Float",
    "Interval", "FiniteSet", "Union", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Symbol",
    "Min", "Max", "re", "im", "conjugate",
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(sympy, name) for name in KNOWN} | {
    "abs": sympy.Abs, "ln": sympy.log, "arcsin": sympy.asin, "arctan": sympy.atan,
    "arccos": sympy.acos, "Interval.open": sympy.Interval.open,
    "Interval.Lopen": sympy.Interval.Lopen, "Interval.Ropen": sympy.Interval.Ropen,
}  # fmt: skip
CONSTANTS = {
    "pi": sympy.pi, "E": sympy.E, "e": sympy.E, "I": sympy.I, "oo": sympy.oo, "inf": sympy.oo,
    "EmptySet": sympy.S.EmptySet, "Reals": sympy.S.Reals,
}  # fmt: skip
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: power(a, b),
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
}  # fmt: skip
# the library cannot parse \sec^2(y)
RECIPROCAL = re.compile(
    r"\\(sec|csc|cot)\s*\^\s*\{?\s*(\d)\s*\}?\s*(\([^()]*\)|\{[^{}]*\}|\d*(?:[a-zA-Z]|\\[a-zA-Z]+))"
)
MAX_POWER = 10_000  # a power with a larger exponent stays unevaluated
MAX_COMBINED = 10_000  # a factorial of a larger argument is rejected


@lru_cache(maxsize=4096)
def from_latex(text: str) -> Any:
    """Parse LaTeX without delimiters into a sympy expression, or return None. A single variable `i`
    is the imaginary unit."""
    if len(text) > MAX_LATEX:
        return None
    try:
        text = RECIPROCAL.sub(r"(\\\1 \3)^{\2}", text)
        found = parse_latex_cached(normalize_latex(text, NORMALIZATION))
        names = {symbol.name: symbol for symbol in found.free_symbols}
        return found.subs(names["i"], sympy.I) if [*names] == ["i"] else found
    except MemoryError:
        raise
    except Exception:  # the library passes on any error of its parser
        return None


@lru_cache(maxsize=4096)
def from_python(text: str) -> Any:
    """Parse Python notation into a sympy expression. Return None for text that is too long, that
    `build` does not support, or whose value would be enormous."""
    if len(text) > MAX_LATEX:
        return None
    text = re.sub(r"(?<![<>=!])=(?!=)", "==", text.strip().replace("^", "**"))
    try:
        return build(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, AttributeError, ArithmeticError):
        return None


def in_latex(expression: Any) -> set[str]:
    """Return the LaTeX of an expression, in two forms if it has logarithms, because `log` can also
    mean the natural logarithm. Return an empty set if sympy cannot convert the expression."""
    try:
        return {
            sympy.latex(
                expression, ln_notation=natural, inv_trig_style="full", fold_func_brackets=True
            )
            for natural in (True, False)
        }
    except (ValueError, TypeError, RecursionError):
        return set()


def build(node: ast.expr) -> Any:
    """Return the sympy expression of a syntax tree. Raise ValueError for an unsupported node."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return sympy.Rational(str(node.value))
        case ast.Constant(value=bool()):
            return sympy.true if node.value else sympy.false
        case ast.Name(id=name):
            return CONSTANTS.get(name, sympy.Symbol(name, real=True))
        case ast.Attribute(value=ast.Name(id="S" | "sympy" | "sp" | "math"), attr=name) if (
            name in CONSTANTS
        ):
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -build(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return build(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            return OPERATORS[type(operator)](build(left), build(right))
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
            return sympy.Symbol(name, real=True)
        case ast.Call(func=ast.Name(id="Matrix"), args=[ast.List(elts=rows)], keywords=[]):
            return sympy.Matrix([cells(row) for row in rows])
        case ast.Call(func=function, args=args, keywords=[]) if name_of(function) in FUNCTIONS:
            return called(name_of(function), [build(arg) for arg in args])
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return COMPARISONS[type(operator)](build(left), build(right))
        case ast.Tuple(elts=parts):
            return sympy.Tuple(*map(build, parts))
        case ast.List(elts=parts) | ast.Set(elts=parts):
            return sympy.FiniteSet(*map(build, parts))
    raise ValueError(f"{type(node).__name__} is not known")


def name_of(function: ast.expr) -> str:
    """Return the name of a function without its module."""
    return ast.unparse(function).removeprefix("sympy.").removeprefix("sp.").removeprefix("math.")


def cells(row: ast.expr) -> list[Any]:
    """Return the cells of a matrix row, which is a list or a single number."""
    return [build(cell) for cell in row.elts] if isinstance(row, ast.List) else [build(row)]


def called(name: str, arguments: list[Any]) -> Any:
    """Return the value of a function call. Raise ValueError if the value would be enormous."""
    large = any(argument.is_number and abs(argument) > MAX_COMBINED for argument in arguments)
    if name in ("factorial", "binomial", "gamma") and large:
        raise ValueError(f"{name} of a large number")
    return FUNCTIONS[name](*arguments)


def power(base: Any, exponent: Any) -> Any:
    """Return a power, unevaluated if it would be enormous. Raise ValueError if the exponent
    contains a power whose exponent is above MAX_POWER, or if an argument is not an expression."""
    if not isinstance(base, sympy.Expr) or not isinstance(exponent, sympy.Expr):
        raise ValueError("base or exponent is not an expression")
    if exponent.has(sympy.Pow) and any(
        power.exp.is_Integer and abs(power.exp) > MAX_POWER for power in exponent.atoms(sympy.Pow)
    ):
        raise ValueError("a tower of powers")
    small = not exponent.is_Rational or abs(exponent) <= MAX_POWER
    if base.is_Rational and exponent.is_Rational:
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        small = bits * abs(exponent) <= MAX_BITS
    return sympy.Pow(base, exponent, evaluate=bool(small))


def equal(gold: Any, given: Any, tolerance: Tolerance) -> bool:
    """Return whether two expressions are equal. Numbers are compared exactly or within a tolerance;
    tuples, sets, intervals and matrices element by element; anything else by math-verify."""
    if is_number(gold) and is_number(given):
        found = equal_numbers(gold, given, tolerance)
    else:
        found = equal_parts(gold, given, tolerance)
    if found is not None:
        return found
    return bool(
        library_equal(gold, given, DECIMALS, allow_set_relation_comp=True, timeout_seconds=None)
    )


def equal_parts(gold: Any, given: Any, tolerance: Tolerance) -> bool | None:
    """Return whether two tuples, sets, intervals or matrices are equal; None for other types."""
    match gold, given:
        case (sympy.MatrixBase(), sympy.MatrixBase()):
            return gold.shape == given.shape and all_equal(gold, given, tolerance)
        case (sympy.Tuple(), sympy.Tuple()):
            return len(gold) == len(given) and all_equal(gold, given, tolerance)
        case (sympy.Interval(), sympy.Interval()):
            brackets = (gold.left_open, gold.right_open) == (given.left_open, given.right_open)
            return brackets and all_equal(gold.args[:2], given.args[:2], tolerance)
        case (sympy.FiniteSet(), sympy.FiniteSet()):
            return pairs_up(gold.args, given.args, lambda a, b: equal(a, b, tolerance))
    return None


def all_equal(golds: Iterable[Any], given: Iterable[Any], tolerance: Tolerance) -> bool:
    """Return whether elements at the same position are equal."""
    return all(equal(a, b, tolerance) for a, b in zip(golds, given, strict=True))


def is_number(value: Any) -> bool:
    """Return whether an expression is a finite number, and not a percentage (which the LaTeX parser
    leaves partly unevaluated)."""
    return (
        isinstance(value, sympy.Expr)
        and bool(value.is_number)
        and not value.has(sympy.UnevaluatedExpr, sympy.oo, sympy.zoo, sympy.nan)
    )


def equal_numbers(gold: Any, given: Any, tolerance: Tolerance) -> bool | None:
    """Return whether two numbers are equal; None if they cannot be evaluated."""
    fractions = rational(gold), rational(given)
    if fractions[0] is not None and fractions[1] is not None:
        return numbers.equal(fractions[0], fractions[1], tolerance)
    lazy = gold.has(*LAZY) or given.has(*LAZY)
    digits, least = (LAZY_DIGITS, LAZY_SAME) if lazy else (DIGITS, SAME)
    try:
        if not lazy:  # the difference from a large number may be in its last digit
            large = int(sympy.log(abs(exact(gold)), 10).evalf(5))
            digits += min(max(large, 0), MAX_DIGITS)
            least = SAME / sympy.Integer(10) ** (digits - DIGITS)
        first, second = (exact(value).evalf(digits, maxn=2 * digits) for value in (gold, given))
        size, gap = abs(first), abs(first - second)
        if not (size.is_Float or size.is_Integer) or not (gap.is_Float or gap.is_Integer):
            return None
        return bool(gap <= max(tolerance.absolute, size * max(tolerance.relative, least)))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def rational(value: Any) -> Fraction | None:
    """Return the value of an expression that consists of sums, products and integer powers of
    rational numbers; None for other expressions, and for too many digits."""
    if isinstance(value, sympy.Float):
        return Fraction(str(value))
    if isinstance(value, sympy.Rational):
        return Fraction(int(value.p), int(value.q))
    if not isinstance(value, sympy.Add | sympy.Mul | sympy.Pow):
        return None
    parts = [rational(part) for part in value.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if isinstance(value, sympy.Add):
        return sum(known, Fraction(0))
    if isinstance(value, sympy.Mul):
        return math.prod(known, start=Fraction(1))
    base, exponent = known
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > MAX_BITS or (not base and exponent < 0):
        return None
    return base ** int(exponent)


def angle(scale: Fraction) -> Any:
    """Return the exact conversion factor of angles: 180/pi if `scale` is above 1, else pi/180."""
    return 180 / sympy.pi if scale > 1 else sympy.pi / 180


def exact(value: Any) -> Any:
    """Return the expression with its decimals replaced by fractions."""
    return value.xreplace({f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)})
