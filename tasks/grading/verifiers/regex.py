"""`regex`: the completion matches a regular expression, which is the gold or a setting.

The pattern must match the whole of the stripped completion (`match: full`) or any part of it
(`search`). Flags are part of the pattern: `(?i)`, `(?s)`. To match only an answer, put the verifier
into a `part`. Python's `re` can take exponential time, which ends in a `timeout` at the process
limits, so write patterns with care."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from tasks.common.params import ParamsError
from tasks.grading.verdict import Verdict

canonical_completion = None  # a pattern is not a text that matches it


def ready(settings: Mapping[str, Any]) -> None:
    """Raise ParamsError for an invalid regular expression."""
    try:
        re.compile(settings["pattern"] or "")
    except re.error as error:
        raise ParamsError(
            f"`pattern` {settings['pattern']!r} is not a regular expression: {error}"
        ) from error


def verify(
    completion: str, answer: str, *, pattern: str | None, match: Literal["full", "search"]
) -> Verdict:
    """Return `correct` or `wrong`; `unparsed` for an empty completion. A gold that is not a regular
    expression is an `error`; with the setting `pattern` the gold is ignored."""
    expression = re.compile(answer if pattern is None else pattern)
    text = completion.strip()
    if not text:
        return Verdict("unparsed", "")
    found = expression.fullmatch(text) if match == "full" else expression.search(text)
    return Verdict("wrong", text) if found is None else Verdict("correct", found[0])
