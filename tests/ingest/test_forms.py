"""Files of any published form: paths with indices, prompts of several fields, messages, golds of
every form, and the selection of rows in mixed files."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.grading.loading import load
from tasks.ingest.fields import MISSING, field
from tests.ingest.helpers import entry, found, lines

ROW = {
    "reward_model": {"ground_truth": [{"x": "5"}, {"x": "6"}]},
    "final_answer": ["2", "3"],
    "packed": '{"golds": ["7"]}',
    "a.b": 1,
    "odd[": 2,
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("final_answer[0]", "2"),
        ("final_answer[1]", "3"),
        ("final_answer[2]", MISSING),
        ("final_answer.x", MISSING),
        ("reward_model.ground_truth[1].x", "6"),
        ("packed.golds[0]", "7"),
        ("a.b", 1),
        ("odd[", 2),
        ("nothing|final_answer[1]", "3"),
        ("nothing|neither", MISSING),
    ],
)
def test_path_of_names_indices_and_json_text(path: str, value: Any) -> None:
    assert field(ROW, path) is value or field(ROW, path) == value


def one(tmp_path: Path, row: Any, **settings: Any) -> tuple[str, str]:
    """Return prompt and gold of the only row of a file, or reason and detail of its rejection."""
    kept, rejected = found(entry(lines(tmp_path / "a.jsonl", row), **settings))
    if kept:
        return kept[0].prompt, kept[0].answer
    return rejected[0].reason, rejected[0].detail


@pytest.mark.parametrize(
    ("prompt", "row", "expected"),
    [
        ("{c?}\n{q}", {"c": None, "q": "Why?"}, "Why?"),
        ("{c?}\n{q}", {"c": "Then.", "q": "Why?"}, "Then.\nWhy?"),
        ("Use \\boxed{}: {q[0].t}", {"q": [{"t": "1 + 1"}]}, "Use \\boxed{}: 1 + 1"),
        ("{{{q}}}", {"q": "x"}, "{x}"),
        ("{n} + {n} = ?", {"n": 2.0}, "2 + 2 = ?"),
    ],
)
def test_prompt_of_several_fields(tmp_path: Path, prompt: str, row: Any, expected: str) -> None:
    assert one(tmp_path, {**row, "gold": "1"}, prompt=prompt)[0] == expected


def test_prompt_with_an_empty_or_missing_part_is_rejected(tmp_path: Path) -> None:
    good = {"body": "Two cups.", "question": "How many?", "gold": "1"}
    rows = [good, {**good, "question": None}, {**good, "question": ["a"]}, {"body": "b", "gold": 1}]
    kept, rejected = found(
        entry(lines(tmp_path / "a.jsonl", *rows), prompt="{body} {question}", answer="gold")
    )
    assert len(kept) == 1
    assert [row.reason for row in rejected] == ["empty_prompt", "malformed", "missing_field"]


@pytest.mark.parametrize(("gold", "text"), [(True, "true"), (False, "false")])
def test_boolean_gold_becomes_true_or_false(tmp_path: Path, gold: bool, text: str) -> None:
    row = {"q": "Is 7 a prime?", "gold": gold}
    prompt = "{q} Answer true or false."
    result = one(tmp_path, row, prompt=prompt, verifier="math")
    assert result == ("Is 7 a prime? Answer true or false.", text)
    for answer in ("true", "True", "false"):
        outcome = load("math", {}).verify(f"\\boxed{{{answer}}}", text).outcome
        assert (outcome == "correct") == (answer.lower() == text)


@pytest.mark.parametrize(
    ("row", "settings", "gold"),
    [
        ({"g": 145.0}, {}, "145"),
        ({"g": 1e20}, {}, "1" + 20 * "0"),
        ({"g": " 1,000 "}, {}, "1,000"),
        ({"g": ["2"]}, {"golds": "all"}, "2"),
        ({"g": ["2", "3", "2"]}, {"golds": "all"}, '{"all": ["2", "3"]}'),
        ({"g": [0.5, "1/2"]}, {"golds": "any"}, '{"any": ["0.5", "1/2"]}'),
        ({"g": "2"}, {"golds": "any"}, "2"),
        ({"g": '["15"]'}, {"golds": "any", "json": ["g"]}, "15"),
        ({"g": "[-2,7]"}, {"golds": "any"}, "[-2,7]"),
        ({"g": "9.8", "t": "1e-1"}, {"tolerance": "t"}, '{"answer": "9.8", "tolerance": 0.1}'),
        (
            {"g": ["2", "3"], "t": 1},
            {"golds": "all", "tolerance": "t"},
            '{"all": ["2", "3"], "tolerance": 1.0}',
        ),
        ({"g": "9.8", "t": None}, {"tolerance": "t"}, "9.8"),
        ({"g": "9.8"}, {"tolerance": "t"}, "9.8"),
        ({"g": ["9.8"], "t": 1}, {"golds": "all", "tolerance": "t"}, None),
        ({"g": "It is $\\boxed{\\frac{1}{2}}$."}, {"extract": "boxed"}, "\\frac{1}{2}"),
        ({"g": "Two.\n#### 2"}, {"extract": "####"}, "2"),
    ],
)
def test_golds_of_every_form(tmp_path: Path, row: Any, settings: Any, gold: str | None) -> None:
    expected = gold or '{"answer": "9.8", "tolerance": 1.0}'
    assert one(tmp_path, {"question": "Q?", **row}, answer="g", **settings) == ("Q?", expected)


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"g": ["2", ""]}, {"golds": "all"}, "malformed"),
        ({"g": []}, {"golds": "all"}, "empty_answer"),
        ({"g": ["2", "3"]}, {}, "malformed"),
        ({"g": "2", "t": "a lot"}, {"tolerance": "t"}, "malformed"),
        ({"g": "2", "t": -1}, {"tolerance": "t"}, "malformed"),
        ({"g": "", "t": 1}, {"tolerance": "t"}, "empty_answer"),
        ({"g": "2"}, {"json": ["g"]}, "malformed"),
        ({"g": "It is 2."}, {"extract": "boxed"}, "malformed"),
        ({"g": "It is 2."}, {"extract": "####"}, "malformed"),
        ({"g": None}, {"extract": "boxed", "json": ["g"]}, "empty_answer"),
    ],
)
def test_unreadable_gold_is_rejected(tmp_path: Path, row: Any, settings: Any, reason: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"question": "Q?", **row})
    kept, (rejected,) = found(entry(path, answer="g", **settings))
    assert (kept, rejected.reason) == ([], reason)


def test_messages_of_from_and_value_and_an_empty_last_turn(tmp_path: Path) -> None:
    message = {"role": "user", "content": "1 + 1?"}
    published: list[Any] = [
        [{"from": "human", "value": "1 + 1?"}],
        [{"from": "user", "value": "1 + 1?"}, {"from": "gpt", "value": ""}],
        [message, {"role": "assistant", "content": None}],
        [message, {"role": "assistant", "content": "2"}],
    ]
    path = lines(tmp_path / "a.jsonl", *({"question": each, "gold": "2"} for each in published))
    kept, rejected = found(entry(path))
    assert [json.loads(row.messages or "") for row in kept] == [[message]] * 3
    assert [(row.line, row.reason) for row in rejected] == [(4, "malformed")]
    packed = lines(tmp_path / "b.jsonl", {"question": json.dumps(published[0]), "gold": "2"})
    (row,), _ = found(entry(packed, json=["question"]))
    assert json.loads(row.messages or "") == [message]


WHOLE = [{"question": "1 + 1?", "gold": "2"}, {"question": "2 + 2?", "gold": "4"}]


@pytest.mark.parametrize(
    "content",
    [
        {"question": ["1 + 1?", "2 + 2?"], "gold": ["2", "4"]},
        {"question": {"0": "1 + 1?", "1": "2 + 2?"}, "gold": {"0": "2", "1": "4"}},
        {"data": WHOLE},
        {"version": 1, "tags": ["a"], "examples": WHOLE, "notes": []},
        {"labels": ["a", "b", "c"], "examples": WHOLE},
        WHOLE,
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_json_of_columns_or_of_rows_under_a_key(
    tmp_path: Path, content: Any, indent: int | None
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content, indent=indent))
    kept, _ = found(entry(path))
    assert [(row.line, row.prompt, row.answer) for row in kept] == [
        (1, "1 + 1?", "2"),
        (2, "2 + 2?", "4"),
    ]


def test_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.json", *WHOLE, b"", b"{")
    kept, (bad,) = found(entry(path))
    assert ([row.answer for row in kept], bad.line) == (["2", "4"], 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"question": ["1 + 1?"], "gold": ["2", "4"]}, r"different rows \(question 1, gold 2\)"),
        ({"train": WHOLE, "test": WHOLE[:1]}, r"several arrays of objects \(train, test\)"),
    ],
)
def test_json_without_one_set_of_rows_is_refused(
    tmp_path: Path, content: Any, message: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=message):
        found(entry(tmp_path / "a.json"))


@pytest.mark.parametrize("name", ["a.arrow", "download"])
@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_files_and_streams(tmp_path: Path, name: str, new: Any) -> None:
    table = pa.Table.from_pylist([{**row, "meta": {"level": n}} for n, row in enumerate(WHOLE)])
    with new(str(tmp_path / name), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=1):
            writer.write_batch(batch)
    kept, _ = found(entry(tmp_path / name, level="meta.level"))
    assert [(row.line, row.prompt, row.answer, row.level) for row in kept] == [
        (1, "1 + 1?", "2", "0"),
        (2, "2 + 2?", "4", "1"),
    ]
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match="is damaged"):
        found(entry(tmp_path / name))


MIXED = [
    {"question": "1 + 1?", "gold": "2", "kind": "sum", "data_source": "openai/gsm8k"},
    {"question": "x?", "gold": "x", "kind": "proof", "data_source": "openai/gsm8k"},
    {"question": "Which?", "gold": "A", "kind": "sum", "data_source": "mmlu"},
    {"question": "How?", "gold": "3", "kind": "sum", "data_source": 7, "day": "2024-01-31"},
    {"question": "When?", "gold": "4"},
]
BY_COLUMN = {
    "column": "data_source",
    "values": {"openai/gsm8k": "numeric", 7.0: "exact"},
    "otherwise": "reject",
}


def test_rows_are_selected_by_a_column_and_others_rejected(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *MIXED)
    kept, rejected = found({**entry(path), "where": {"kind": ["sum", "product"]}})
    assert [row.line for row in kept] == [1, 3, 4]
    assert [(row.line, row.reason) for row in rejected] == [(2, "filtered"), (5, "filtered")]
    assert rejected[0].detail == "kind is 'proof', and `where` names 'product, sum'"
    numbers, _ = found({**entry(path), "where": {"data_source": 7, "day": date(2024, 1, 31)}})
    assert [row.line for row in numbers] == [4]
    with pytest.raises(ParamsError, match="none of 5 rows is used: there is no field kind"):
        found({**entry(path), "where": {"kind": "sums"}})


def test_verifier_by_a_column(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *MIXED)
    kept, rejected = found({**entry(path), "verifier": BY_COLUMN})
    named = [(1, "numeric"), (2, "numeric"), (4, "exact")]
    assert [(row.line, row.verifier) for row in kept] == named
    assert [(row.line, row.reason) for row in rejected] == [(3, "no_verifier"), (5, "no_verifier")]
    assert "data_source is 'mmlu'" in rejected[0].detail
    kept, _ = found({**entry(path), "verifier": {**BY_COLUMN, "otherwise": "choice"}})
    assert [row.verifier for row in kept] == ["numeric", "numeric", "choice", "exact", "choice"]


def test_row_with_an_image_is_rejected(tmp_path: Path) -> None:
    plain = {"question": "1 + 1?", "gold": "2"}
    rows = [
        {**plain, "image": None, "images": []},
        {**plain, "image": {"bytes": None, "path": None}},
        {**plain, "image": "a.png"},
        {**plain, "images": [{"path": "a.png"}]},
        {**plain, "question": "<image>\nHow many?"},
        {**plain, "question": [{"role": "user", "content": "See <image1>."}]},
    ]
    kept, rejected = found(entry(lines(tmp_path / "a.jsonl", *rows)))
    assert [row.line for row in kept] == [1, 2]
    assert [row.reason for row in rejected] == ["needs_image"] * 4


def test_question_is_a_field_or_between_two_texts(tmp_path: Path) -> None:
    wrapped = [
        {"question": f"Solve it.\n\nHow many are {n}?\n\nBox it.", "gold": n, "raw": f"{n}?"}
        for n in range(3)
    ]
    path = lines(tmp_path / "a.jsonl", *wrapped, {"question": "Bare?", "gold": 1, "raw": None})
    kept, _ = found({**entry(path), "question": {"between": ["Solve it.", "Box it."]}})
    assert [row.question for row in kept] == [*(f"How many are {n}?" for n in range(3)), "Bare?"]
    assert kept[0].prompt == wrapped[0]["question"]
    kept, _ = found({**entry(path), "question": {"between": [None, "\n\nBox it."]}})
    assert kept[1].question == "Solve it.\n\nHow many are 1?"
    kept, _ = found({**entry(path), "question": "raw"})
    assert [row.question for row in kept] == ["0?", "1?", "2?", "Bare?"]
    with pytest.raises(ParamsError, match="none of 4 prompts has the texts"):
        found({**entry(path), "question": {"between": ["Answer it.", None]}})
