"""The keys of an entry of `ingest.sources` that apply to the rows of any file: the rows to use
(`where`), the verifier of each row (`verifier`), and the part of a prompt that is the question
(`question`).

An unused row becomes a rejection with a reason. Not supported: conditions other than equality."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.common.params import ParamsError, parse
from tasks.ingest.candidates import as_text, texts
from tasks.ingest.fields import MISSING, Unusable, field

REJECT = "reject"
PLACEHOLDER = re.compile(r"<image[ _]?\d*>")
IMAGES = ("image", "images")


@dataclass(frozen=True)
class ByColumn:
    """A verifier per value of `column`; `otherwise` is a verifier for the rest, or `reject`."""

    column: str
    values: dict[str, str]
    otherwise: str


@dataclass(frozen=True)
class Between:
    """The two texts around the question in a prompt; null for the prompt's start or end."""

    between: list[str | None]


def verifier_of(value: Any, where: str) -> str | ByColumn:
    """Return a verifier's name, or a parsed ByColumn. Raise ParamsError for anything else."""
    if isinstance(value, str):
        return value
    spec = parse(value, ByColumn, where)
    return replace(spec, values={as_text(k): v for k, v in spec.values.items()})


def question_of(value: Any, where: str) -> str | Between | None:
    """Return the name of the question's field, the two texts around the question, or None if the
    value is None. Raise ParamsError for anything else."""
    if value is None or isinstance(value, str):
        return value
    marks = parse(value, Between, where)
    if len(marks.between) != 2 or not any(marks.between):
        raise ParamsError(
            f"{where}.between is {marks.between}; give the text before the question and the one "
            "after it, null for none"
        )
    return marks


def conditions_of(value: Any, where: str) -> dict[str, frozenset[str]]:
    """Return the allowed values of each column as texts. Raise ParamsError for a column without
    values."""
    conditions = {}
    for column, allowed in (value or {}).items():
        values = allowed if isinstance(allowed, list) else [allowed]
        if not values or any(isinstance(one, dict | list) for one in values):
            raise ParamsError(f"{where}.{column} is {allowed!r}; give a value or a list of values")
        conditions[str(column)] = frozenset(map(as_text, values))
    return conditions


def select(fields: Mapping[str, Any], conditions: Mapping[str, frozenset[str]]) -> None:
    """Raise Unusable if a row does not meet the conditions, or requires an image."""
    for column, allowed in conditions.items():
        value = field(fields, column)
        if value is MISSING:
            raise Unusable(f"there is no field {column}, by which `where` chooses", "filtered")
        if as_text(value) not in allowed:
            names = ", ".join(sorted(allowed))[:80]
            shown = f"{column} is {as_text(value)[:80]!r}, and `where` names {names!r}"
            raise Unusable(shown, "filtered")
    for name in IMAGES:
        image = fields.get(name)
        # some tables have a mapping of nulls for no image
        if any(image.values()) if isinstance(image, dict) else image:
            detail = f"the field {name} names an image, and images are not read"
            raise Unusable(detail, "needs_image")


def placeholder(prompt: Any) -> str | None:
    """Return the image placeholder in a prompt, or None."""
    found = (PLACEHOLDER.search(text) for text in texts(prompt))
    return next((match[0] for match in found if match), None)


def row_verifier(spec: str | ByColumn, fields: Mapping[str, Any]) -> str:
    """Return the verifier of a row. Raise Unusable if there is none."""
    if isinstance(spec, str):
        return spec
    value = field(fields, spec.column)
    name = spec.otherwise
    detail = f"there is no field {spec.column}, which names the verifier"
    if value is not MISSING:
        name = spec.values.get(as_text(value), spec.otherwise)
        detail = f"{spec.column} is {as_text(value)[:80]!r}, for which `verifier` names none"
    if name == REJECT:
        raise Unusable(detail, "no_verifier")
    return name


def between(text: str, marks: Between) -> str | None:
    """Return the part of a prompt between the first occurrence of the first mark and the last
    occurrence of the second; None if a mark is missing or the part is empty."""
    start, end = marks.between
    if start is not None:
        _, mark, text = text.partition(start)
        if not mark:
            return None
    if end is not None:
        text, mark, _ = text.rpartition(end)
        if not mark:
            return None
    return text.strip() or None
