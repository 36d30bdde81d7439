r"""`math`: the completion's answer is mathematically equal to the gold.

The answer is the last box (boxes joined only by `and`, `or` or `,` are one answer), `<answer>` tag
or `####` (see `marked.final_answers`); else the text after "the answer is"; else the last formula
or number. `tasks.grading.answers.equality` decides equality: numbers exactly, units if both are
known, words letter by letter, everything else by the library math-verify. Golds may list several
answers or contain a tolerance (`tasks.grading.answers.golds`).

Settings: `dialect` is the notation of the golds, `latex` or `sympy` (`2*pi*sqrt(3)`, `x**2`;
nothing is executed); `relative_tolerance` is for measured quantities; null compares exactly;
`words` reads number words as numbers."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from tasks.grading.answers import equality, running_text
from tasks.grading.answers.copying import is_computed
from tasks.grading.answers.forms import is_doubted, is_word
from tasks.grading.answers.golds import read_gold
from tasks.grading.answers.marked import final_answers, is_formula, statement
from tasks.grading.answers.numbers import Tolerance, spelled
from tasks.grading.answers.units import TEXT
from tasks.grading.verdict import Verdict
from tasks.grading.verifiers import math_verify

LIBRARIES = math_verify.LIBRARIES
ANSWERS = True
REFUSES_COPIES = True

FORMULAS = (
    r"\frac{1}{2}x^2 - 3\sqrt{5}y + 2",
    r"(1, \frac{\pi}{2}]",
    r"\{1, 2\}",
    r"(-\infty, 3) \cup [4, 5]",
    r"x \le 2 \sin(t)",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    r"2^{10} \cdot 3! + |x|",
    r"f(x) = \log_2 x + e^{-x}",
    r"a_1 + \cos^2 45^\circ",
    r"1 \pm i",
)
OPTION = re.compile(r"\(?[A-J]\)?")  # of a multiple-choice question
Dialect = Literal["latex", "sympy"]


def verify(
    completion: str,
    answer: str,
    *,
    dialect: Dialect = "latex",
    relative_tolerance: float | None = None,
    words: bool = False,
) -> Verdict:
    """Return `correct`, `wrong`, or `unparsed` if no answer is found. An unreadable gold is an
    `error`."""
    if words:
        completion, answer = spelled(completion), spelled(answer)
    gold = read_gold(answer, relative_tolerance)
    for text in gold.answers:
        if not equality.readable(text, dialect):
            return Verdict("error", f"the gold answer {text[:80]!r} cannot be read as mathematics")
    verdict = Verdict("unparsed", "")
    for given in candidates(completion, gold.answers):
        same = compare(gold.answers, gold.all_of_them, given, gold.tolerance, dialect)
        if same is not None:
            doubted = is_doubted(given) and not any(map(is_doubted, gold.answers))
            right = same and not doubted and is_computed(given, gold.answers)
            return Verdict("correct" if right else "wrong", given.strip())
        verdict = Verdict("unparsed", given.strip())
    return verdict


def unwrapped(answer: str) -> str:
    r"""Return the sentence in an answer that is `\text{sentence}`; any other answer unchanged."""
    found = TEXT.fullmatch(answer.strip())
    return found[1] if found and running_text.is_prose(found[1]) else answer


def ready(settings: Mapping[str, Any]) -> None:
    """Parse typical formulas once, so that all processes inherit the parser's filled caches."""
    for formula in FORMULAS:
        equality.parsed(formula)


def canonical_completion(answer: str) -> str:
    """Return a completion with exactly this gold as its answer."""
    gold = read_gold(answer)
    given = ", ".join(gold.answers) if gold.all_of_them else gold.answers[0]
    return given if "\\boxed" in given else rf"\boxed{{{given}}}"


@lru_cache(maxsize=1 << 14)
def compare(
    answers: tuple[str, ...],
    all_of_them: bool,
    given: str,
    tolerance: Tolerance,
    dialect: Dialect,
) -> bool | None:
    """Return whether an answer equals one of the golds, or lists all of them; None if it cannot be
    read. Cached, because many completions of a group have the same answer."""
    if all_of_them:
        return equality.same_list(answers, given, tolerance, dialect)
    found = [equality.same(gold, given, tolerance, dialect) for gold in answers]
    return True if True in found else None if None in found else False


def candidates(completion: str, golds: tuple[str, ...]) -> Iterator[str]:
    """Yield possible answers, the most likely first; the first readable one counts."""
    answers = final_answers(completion)
    if answers is None:
        return
    marked = [unwrapped(answer) for answer in answers]
    words = any(is_word(gold) for gold in golds)
    if marked and (words or not any(map(running_text.is_prose, marked))):
        yield ", ".join(marked)
        return
    whole = ("\n".join(marked) or completion).strip()
    said = statement(whole[-running_text.MAX_TEXT :], bool)
    if said and (words or OPTION.fullmatch(said)):
        yield said
    if is_formula(whole) or words:
        yield whole
    # the result of a derivation in running text is its last side
    values = not any("=" in gold for gold in golds)
    for formula in running_text.formulas(whole):
        yield formula.rpartition("=")[2] if values and "," not in formula else formula
