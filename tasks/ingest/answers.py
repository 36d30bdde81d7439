"""Golds other than one plain text: JSON text, the marked answer of a solution, several golds, and
golds with a tolerance.

Several golds become the JSON text `{"any": [...]}` or `{"all": [...]}`, optionally with the key
`tolerance`. A single gold with a tolerance becomes `{"answer": ..., "tolerance": ...}`. A verifier
that does not support these rejects the row with its reason. Lists are never assumed to be golds:
`[-2,7]` may be an interval."""

import json
import math
from typing import Any, Literal

from tasks.grading.answers.marked import gold_boxed
from tasks.ingest.candidates import as_text, is_text_or_number
from tasks.ingest.fields import MISSING, Unusable, decoded

Golds = Literal["any", "all"]
Extract = Literal["boxed", "####"]


def gold(value: Any, golds: Golds | None, tolerance: Any) -> Any:
    """Return a row's gold. With `golds`, a list becomes JSON text, or its item if it has only one.
    A gold with a tolerance (not null or empty) becomes JSON text. Others are unchanged."""
    if golds is not None and isinstance(value, list):
        texts = several(value)
        value = texts[0] if texts else None
        if len(texts) > 1:
            allowed = {"tolerance": width(tolerance)} if is_given(tolerance) else {}
            return json.dumps({golds: texts, **allowed}, ensure_ascii=False)
    if not is_given(tolerance) or not is_text_or_number(value) or not as_text(value).strip():
        return value
    return json.dumps(
        {"answer": as_text(value).strip(), "tolerance": width(tolerance)}, ensure_ascii=False
    )


def several(values: list[Any]) -> list[str]:
    """Return a list's distinct golds as texts. Raise Unusable for a blank or invalid one."""
    for value in values:
        if not is_text_or_number(value) or not as_text(value).strip():
            raise Unusable(f"one of the golds is {value!r:.80}, neither text nor a finite number")
    return list(dict.fromkeys(as_text(value).strip() for value in values))


def is_given(tolerance: Any) -> bool:
    """Return whether the row has a value for the tolerance."""
    return tolerance is not None and tolerance is not MISSING and tolerance != ""


def width(tolerance: Any) -> float:
    """Parse a tolerance. Raise Unusable if it is not a number above 0."""
    try:
        number = math.nan if isinstance(tolerance, bool) else float(tolerance)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise Unusable(f"the tolerance is {tolerance!r:.80}, not a number above 0")
    return number


def from_json(value: Any, path: str) -> Any:
    """Parse text as a JSON list or object, or raise Unusable. Return blank or non-text as it is."""
    if not isinstance(value, str) or not value.strip():
        return value
    found = decoded(value)
    if found is MISSING:
        raise Unusable(f"the field {path} has no JSON list or object: {value!r:.120}")
    return found


def extracted(solution: Any, what: Extract | None) -> Any:
    """Return the gold in a worked solution: the content of its last box (or of its last boxes, if
    they are joined), or the text after the last `####`. Raise Unusable if there is none. Return a
    blank or non-text solution unchanged, and any solution if `what` is None."""
    if what is None or not isinstance(solution, str) or not solution.strip():
        return solution
    if what == "boxed":
        found = gold_boxed(solution)
    else:
        found = solution.rpartition(what)[2].strip() if what in solution else None
    if found is None:
        raise Unusable(f"the solution has no {'box' if what == 'boxed' else what}")
    return found
