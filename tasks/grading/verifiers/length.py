"""`length`: the completion has between `minimum` and `maximum` characters or words.

It is meant for composites: the score is 1 within the range and falls linearly to 0 at `slack` units
outside it. Leading and trailing white space does not count; words are separated by white space. The
gold is ignored. Tokens cannot be counted here, because a verifier receives the text without the
policy's tokenizer; `sampling.max_tokens` limits tokens."""

from collections.abc import Mapping
from typing import Any, Literal

from tasks.common.params import ParamsError
from tasks.grading.verdict import Verdict

canonical_completion = None  # the gold is ignored


def ready(settings: Mapping[str, Any]) -> None:
    """Raise ParamsError for an invalid range."""
    minimum, maximum, slack = (settings[name] for name in ("minimum", "maximum", "slack"))
    if minimum is None and maximum is None:
        raise ParamsError("`minimum` and `maximum` of a length are both null: set one of them")
    if (minimum or 0) < 0 or (maximum is not None and maximum < (minimum or 0)) or slack < 0:
        raise ParamsError(
            f"a length from {minimum} to {maximum} with a slack of {slack} is not a range: set "
            "0 <= minimum <= maximum, and a slack of 0 or more"
        )


def verify(
    completion: str,
    answer: str,
    *,
    unit: Literal["characters", "words"],
    minimum: int | None,
    maximum: int | None,
    slack: int,
) -> Verdict:
    """Return `correct` within the range, else `wrong`."""
    text = completion.strip()
    length = len(text) if unit == "characters" else len(text.split())
    over = 0 if maximum is None else max(0, length - maximum)
    outside = max(over, (minimum or 0) - length)
    mark = 1.0 - min(1.0, outside / slack) if slack else float(outside == 0)
    return Verdict("correct" if outside == 0 else "wrong", f"{length} {unit}", mark)
