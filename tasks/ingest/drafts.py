"""Draft `ingest.sources` and `ingest.splits` for a file from its first rows: the fields of the
question and the answer, a verifier that suits the answers, and splits that the rows can fill."""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from tasks.common.params import ParamsError, parse
from tasks.ingest import reading
from tasks.ingest.candidates import Rejection, Row, as_text
from tasks.ingest.files.fetching import local_file
from tasks.ingest.files.formats import Record, records
from tasks.ingest.settings import Source
from tasks.ingest.sources.published import SETS

MAX_ROWS = 20_000  # examined at most
MIN_ROWS = 10
QUESTIONS = ("messages", "prompt", "question", "problem", "query", "instruction", "input")
ANSWERS = ("answer", "gold", "final_answer", "target", "expected_answer", "solution", "output")
OPTIONS = ("choices", "options")
NEEDED: dict[str, dict[str, Any]] = {
    "verl": {"level": None},
    "mbpp": {"shown_tests": 3, "challenge_tests": False},
}
FORMS = {
    "numeric": re.compile(r"[-+]?[$€£]?\s?\d[\d,]*(\.\d+)?\s?%?"),
    "choice": re.compile(r"\(?[A-J]\)?"),
    "math": re.compile(r".*(\\|\^|\d\s*/\s*\d|[=+*(\[]).*|[-+]?[\d.,]+", re.DOTALL),
}
OWN = {
    "svamp": {"ID", "Body", "Question", "Equation", "Answer", "Type"},
    "gsm8k": {"question", "answer"},  # with calculations in the answer: <<6/2=3>>
}
"""The fields of the files that presets read."""

MOST = 0.95


def draft(
    location: str, preset: str | None, fields: Sequence[str] | None, max_characters: int | None
) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return an entry of `ingest.sources` for the file at `location`, and `ingest.splits`. `preset`
    may name a published set; if it is None or `mapping`, `fields` are those of the question and the
    answer (None: found by common names). Raise ParamsError for missing fields or too few rows."""
    if preset in (None, "mapping"):  # the fields of `mapping` are found here
        entry = mapping(location, fields, may_be_own=preset is None and fields is None)
    elif preset in SETS:
        entry = {"preset": "published", "settings": {"set": preset, "path": location}}
    else:
        entry = {"preset": preset, "settings": {"path": location, **NEEDED.get(preset, {})}}
    (source,) = reading.sources([parse(entry, Source, "ingest.sources[0]")])
    items = list(islice(reading.rows(0, source, max_characters, None), MAX_ROWS))
    rows = [row for row in items if isinstance(row, Row)]
    number = len({row.question for row in rows})
    if number < MIN_ROWS:
        why = next((f" ({row.detail})" for row in items if isinstance(row, Rejection)), "")
        raise ParamsError(
            f"{location} has {number} different questions that can be used{why}, and three splits "
            f"need {MIN_ROWS}: add rows, or name another file"
        )
    if entry["preset"] == "mapping":
        entry["settings"]["verifier"] = verifier_for([row.answer for row in rows])
    splits = {"train": None, "validation": min(number // 10, 200), "test": min(number // 5, 1024)}
    return entry, splits


def mapping(location: str, fields: Sequence[str] | None, *, may_be_own: bool) -> dict[str, Any]:
    """Return an entry with preset `mapping` and verifier `exact` for now, or raise ParamsError. If
    `may_be_own`, return the entry of a preset for its own file (see OWN)."""
    with local_file(location, None) as path:
        rows = (one.fields for one in records(path, location) if isinstance(one, Record))
        first = next(rows, None)
    if first is None:
        raise ParamsError(f"{location} has no row that can be read: name another file")
    columns = list(first) if isinstance(first, dict) else []
    for preset in (name for name in OWN if may_be_own and OWN[name] == {*columns}):
        if preset != "gsm8k" or "<<" in as_text(first["answer"]):
            return {"preset": preset, "settings": {"path": location}}
    question, answer = fields or (
        next((name for name in names if name in columns), "") for names in (QUESTIONS, ANSWERS)
    )
    if not isinstance(first, dict) or not {question, answer} <= set(columns):
        raise ParamsError(
            f"{location} has the fields {', '.join(columns) or '(none)'}: name those of question "
            "and answer with --fields QUESTION ANSWER"
        )
    gold = as_text(first[answer])
    extract = next((mark for mark in ("####", "boxed") if mark in gold), None)
    name = PurePosixPath(location).name.partition(".")[0]
    settings = {"path": location, "name": name, "prompt": question, "answer": answer, "level": None}
    settings |= {"verifier": "exact"} | ({"extract": extract} if extract else {})
    if options := [one for one in OPTIONS if isinstance(first.get(one), list | dict)]:
        settings["options"] = options[0]
    return {"preset": "mapping", "settings": settings}


def verifier_for(golds: Sequence[str]) -> str:
    """Return the verifier that suits these golds; `exact` if their form is unknown."""
    for name, form in FORMS.items():
        if sum(form.fullmatch(gold) is not None for gold in golds) >= MOST * len(golds):
            return name
    return "exact"
