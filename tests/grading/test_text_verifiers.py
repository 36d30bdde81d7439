"""Verdicts of `regex`, `json_schema`, `qa` and `length` on hand-made cases."""

import json
import socket
from typing import Any

import pytest

from tasks.common.params import ParamsError
from tasks.grading.loading import load
from tasks.grading.verdict import Verdict

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"$ref": "#/$defs/ages"}},
    "required": ["name"],
    "$defs": {"ages": {"type": "array", "items": {"multipleOf": 0.5, "minimum": 0}}},
}
REGEX = {"method": "regex", "pattern": None, "match": "full"}
JSON = {"method": "json_schema", "schema": None, "place": "either"}
QA = {"method": "qa", "threshold": None}
WORDS = {"method": "length", "unit": "words", "minimum": 3, "maximum": 5, "slack": 4}


def graded(settings: dict[str, Any], completion: str, gold: str, **changes: Any) -> Verdict:
    return load("x", {"x": {**settings, **changes}}).verify(completion, gold)


def error_of(settings: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ParamsError) as error:
        load("x", {"x": {**settings, **changes}})
    return str(error.value)


@pytest.mark.parametrize(
    ("completion", "gold", "changes", "outcome", "answer"),
    [
        (" 2024-01-31\n", r"\d{4}-\d\d-\d\d", {}, "correct", "2024-01-31"),
        ("on 2024-01-31", r"\d{4}-\d\d-\d\d", {}, "wrong", "on 2024-01-31"),
        ("on 2024-01-31", r"\d{4}-\d\d-\d\d", {"match": "search"}, "correct", "2024-01-31"),
        ("YES", "(?i)yes|no", {}, "correct", "YES"),
        ("maybe", "maybe", {"pattern": "yes|no"}, "wrong", "maybe"),
        (" \n", "", {}, "unparsed", ""),
    ],
)
def test_regex(
    completion: str, gold: str, changes: dict[str, Any], outcome: str, answer: str
) -> None:
    verdict = graded(REGEX, completion, gold, **changes)
    assert (verdict.outcome, verdict.answer) == (outcome, answer)


def test_invalid_pattern_is_an_error() -> None:
    assert "'(' is not a regular expression" in error_of(REGEX, pattern="(")
    check = load("x", {"x": REGEX}).check
    assert check("a+").outcome == "correct"
    with pytest.raises(Exception, match="missing"):
        check("(")


@pytest.mark.parametrize(
    ("completion", "changes", "outcome", "detail"),
    [
        ('{"name": "Ann", "ages": [3]}', {}, "correct", '"Ann"'),
        ('So:\n```json\n{"name": "Ann"}\n```\nDone.', {}, "correct", "Ann"),
        ('```\n{"name": 1}\n```', {}, "wrong", "$.name: 1 is not of type 'string'"),
        ('{"name": "Ann", "ages": [3, -1]}', {}, "wrong", "$.ages[1]"),
        ('So: {"name": "Ann"}', {}, "unparsed", "So:"),
        ('{"name": "Ann"}', {"place": "block"}, "unparsed", ""),
        ('```json\n{"name": "Ann"}\n```', {"place": "whole"}, "unparsed", "```json"),
        ('{"name": "Ann", "x": NaN}', {}, "unparsed", "NaN"),
        ("[" * 100_000, {}, "unparsed", "["),
        ('{"name": "Ann", "ages": [1e999]}', {}, "unparsed", "1e999"),
    ],
)
def test_json_schema(completion: str, changes: dict[str, Any], outcome: str, detail: str) -> None:
    verdict = graded(JSON, completion, json.dumps(SCHEMA), **changes)
    assert verdict.outcome == outcome
    assert detail in verdict.answer
    verdict = graded(JSON, completion, "unused", schema=SCHEMA, **changes)
    assert verdict.outcome == outcome


def test_invalid_schema_is_an_error() -> None:
    assert "not a JSON schema: 'objekt'" in error_of(JSON, schema={"type": "objekt"})
    check = load("x", {"x": JSON}).check
    assert check(json.dumps(SCHEMA)).outcome == "correct"
    for gold in ("{", '"text"', '{"type": 7}'):
        with pytest.raises(Exception):  # noqa: B017 - the worker turns any exception into an `error`
            check(gold)


def test_reference_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: connections.append(a))
    monkeypatch.setattr(socket.socket, "connect", lambda self, place: connections.append(place))
    with pytest.raises(Exception, match="Unresolvable"):
        graded(JSON, "{}", json.dumps({"$ref": "http://127.0.0.1:9/schema.json"}))
    drafts = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    assert graded(JSON, '{"type": "array"}', json.dumps(drafts)).outcome == "correct"
    assert connections == []


@pytest.mark.parametrize(
    ("completion", "gold", "exact", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", "correct", 1.0),
        ("<answer>Paris</answer>", '["London", "Paris"]', "correct", 1.0),
        (r"It is \boxed{Paris}", "paris", "correct", 1.0),
        ("hello world", "hello", "wrong", 2 / 3),
        ("hello world", '["hello", "world hello there"]', "wrong", 4 / 5),
        ("a b b", "b b c", "wrong", 4 / 5),
        ("no no no", "no", "wrong", 1 / 2),
        ("The", "an", "correct", 1.0),
        ("The", "cat", "wrong", 0.0),
        ("U.S.A.", "usa", "correct", 1.0),
    ],
)
def test_qa_by_exact_match_and_f1(completion: str, gold: str, exact: str, f1: float) -> None:
    verdict = graded(QA, completion, gold)
    assert verdict.outcome == exact
    assert verdict.partial == pytest.approx(f1)


def test_qa_with_a_threshold() -> None:
    assert graded(QA, "hello world", "hello", threshold=0.6).outcome == "correct"
    assert graded(QA, "hello world", "hello", threshold=0.7).outcome == "wrong"
    assert graded(QA, " ", "hello").outcome == "unparsed"
    for gold in ("[]", '["a", 1]', '[""]'):
        with pytest.raises(ValueError, match="not a list of texts"):
            graded(QA, "hello", gold)


@pytest.mark.parametrize(
    ("completion", "changes", "outcome", "mark", "answer"),
    [
        ("one two three", {}, "correct", 1.0, "3 words"),
        (" one two three four five ", {}, "correct", 1.0, "5 words"),
        ("one two three four five six", {}, "wrong", 0.75, "6 words"),
        ("one", {}, "wrong", 0.5, "1 words"),
        ("word " * 20, {}, "wrong", 0.0, "20 words"),
        ("one", {"slack": 0}, "wrong", 0.0, "1 words"),
        ("one", {"minimum": None}, "correct", 1.0, "1 words"),
        ("word " * 20, {"maximum": None}, "correct", 1.0, "20 words"),
        ("abcdefg", {"unit": "characters"}, "wrong", 0.5, "7 characters"),
    ],
)
def test_length(
    completion: str, changes: dict[str, Any], outcome: str, mark: float, answer: str
) -> None:
    verdict = graded(WORDS, completion, "", **changes)
    assert (verdict.outcome, verdict.partial, verdict.answer) == (outcome, mark, answer)


def test_invalid_range_is_an_error() -> None:
    assert "both null" in error_of(WORDS, minimum=None, maximum=None)
    assert "from 6 to 5" in error_of(WORDS, minimum=6)
    assert "slack of -1" in error_of(WORDS, slack=-1)
