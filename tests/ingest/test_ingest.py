"""The stage ingest: every way a row is turned away, disjoint and repeatable splits, the presets, the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from tasks.common.artifacts import PROMPTS, REJECTED, Layout
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.candidates import Rejection, Row
from tasks.ingest.duplicates import resolve
from tasks.ingest.reading import read, sources
from tasks.ingest.splits import Sizes, check_disjoint, prompt_id, split

JSONL = {"name": "mine", "prompt": "question", "answer": "gold", "level": None, "verifier": "numeric"}
CHAIN_SUM = {"name": "chain_sum", "weight": 1.0, "config": {}, "level": "num_terms", "verifier": "numeric"}


def entry(path: Path, **changes: object) -> dict:
    return {"preset": "jsonl", "settings": {**JSONL, "path": str(path), **changes}}


def found(entries: list[dict]) -> tuple[list[Row], list[Rejection]]:
    """What the sources hold after every check."""
    rows = list(read(sources(entries)))
    kept, doubles = resolve([row for row in rows if isinstance(row, Row)])
    return kept, [row for row in rows if isinstance(row, Rejection)] + doubles


def lines(path: Path, *contents: object) -> Path:
    """A JSON Lines file; bytes are written as they are."""
    path.write_bytes(b"".join((c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n" for c in contents))
    return path


def row(prompt: str, answer: str = "1") -> Row:
    return Row("mine", 1, "", prompt, answer, "numeric", "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"question": "1 + 1?", "gold": None}, "empty_answer"),
        ({"question": "1 + 1?", "gold": ""}, "empty_answer"),
        ({"question": "1 + 1?", "gold": " \t"}, "empty_answer"),
        ({"question": "", "gold": "2"}, "empty_prompt"),
        ({"question": "  ", "gold": "2"}, "empty_prompt"),
        ({"question": None, "gold": "2"}, "empty_prompt"),
        ({"gold": "2"}, "missing_field"),
        ({"question": "1 + 1?"}, "missing_field"),
        (b'{"question": "caf\xe9", "gold": "2"}', "undecodable"),
        (b'{"question": "\\ud800", "gold": "2"}', "undecodable"),
        (b'{"question": "1 + 1?", "gold": "2"', "malformed"),
        (b'{"question": "1 + 1?", "gold": NaN}', "malformed"),
        (b'["1 + 1?", "2"]', "malformed"),
        ({"question": ["1 + 1?"], "gold": "2"}, "malformed"),
        ({"question": "1 + 1?", "gold": ["2"]}, "malformed"),
        ({"question": "1 + 1?", "gold": True}, "malformed"),
    ],
)
def test_a_bad_line_is_rejected_alone_with_its_reason_line_and_text(tmp_path, content, reason):
    good = [{"question": "2 + 2?", "gold": "4"}, {"question": "3 + 3?", "gold": "6"}]
    kept, rejected = found([entry(lines(tmp_path / "a.jsonl", good[0], content, good[1]))])
    assert [row.answer for row in kept] == ["4", "6"]
    assert [(one.source, one.line, one.reason) for one in rejected] == [("mine", 2, reason)]
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    assert rejected[0].content == raw.decode(errors="backslashreplace")
    assert rejected[0].detail


def test_duplicates_keep_the_first_and_conflicting_golds_keep_none(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"question": "What is  2 + 2?", "gold": "4"},
        {"question": "what is 2 + 2? ", "gold": 4.0},
        {"question": "Is it 3?", "gold": "3"},
        {"question": "Is it 3?", "gold": "5"},
        {"question": "z^4 - z^2 + 1", "gold": "7"},
        {"question": "z^4 + z^2 + 1", "gold": "8"},
    )
    kept, rejected = found([entry(path)])
    assert [row.line for row in kept] == [1, 5, 6]
    assert {one.line: one.reason for one in rejected} == {
        2: "duplicate",
        3: "conflicting_answers",
        4: "conflicting_answers",
    }


@pytest.mark.parametrize(
    ("gold", "text"), [(145.0, "145"), (0.5, "0.5"), (7, "7"), (-3, "-3"), (1e20, "1" + 20 * "0"), (" 1,000 ", "1,000")]
)
def test_golds_become_text_a_verifier_can_read(tmp_path, gold, text):
    kept, _ = found([entry(lines(tmp_path / "a.jsonl", {"question": "q", "gold": gold}))])
    assert kept[0].answer == text


def test_template_nested_fields_and_level(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"q": {"text": "Why {prompt}?"}, "gold": "2", "level": 3})
    changes = {"prompt": "q.text", "level": "level"}
    kept, _ = found([{**entry(path, **changes), "prompt_template": "Question: {prompt}\nAnswer:"}])
    assert (kept[0].prompt, kept[0].level) == ("Question: Why {prompt}?\nAnswer:", "3")


def test_parquet_rows_and_rejections(tmp_path):
    path = tmp_path / "a.parquet"
    rewards = [{"gold": "4"}, {"gold": None}, {"gold": "6"}]
    pl.DataFrame({"q": ["2 + 2?", "1 + 1?", None], "reward": rewards}).write_parquet(path)
    settings = {"path": str(path), "name": "a", "prompt": "q", "answer": "reward.gold", "level": None}
    kept, rejected = found([{"preset": "parquet", "settings": {**settings, "verifier": "numeric"}}])
    assert [(row.line, row.prompt, row.answer) for row in kept] == [(1, "2 + 2?", "4")]
    assert [(one.line, one.reason) for one in rejected] == [(2, "empty_answer"), (3, "empty_prompt")]
    assert json.loads(rejected[0].content) == {"q": "1 + 1?", "reward": {"gold": None}}


def test_gsm8k_reads_the_gold_after_the_mark(tmp_path):
    path = lines(
        tmp_path / "train.jsonl",
        {"question": "How many?\n", "answer": "1 + 1 = <<1+1=2>>2\nTimes 600.\n#### 1,200"},
        {"question": "How much?", "answer": "I do not know"},
        {"question": "How far?", "answer": "Far.\n#### "},
        {"question": "How long?"},
    )
    kept, rejected = found([{"preset": "gsm8k", "settings": {"path": str(path)}}])
    assert [(row.prompt, row.answer, row.verifier, row.level) for row in kept] == [
        ("How many?\n", "1200", "numeric", "2")
    ]
    assert [(one.line, one.reason) for one in rejected] == [
        (2, "malformed"),
        (3, "empty_answer"),
        (4, "missing_field"),
    ]


def test_reasoning_gym_mixes_tasks_by_weight():
    tasks = [
        {**CHAIN_SUM, "weight": 3.0, "config": {"min_terms": 3, "max_terms": 3}},
        {"name": "spell_backward", "weight": 1.0, "config": {}, "level": "word_len", "verifier": "exact"},
    ]
    kept, rejected = found([{"preset": "reasoning_gym", "settings": {"seed": 5, "num_prompts": 40, "tasks": tasks}}])
    by_source = {
        name: [r for r in kept if r.source == f"reasoning_gym/{name}"] for name in ("chain_sum", "spell_backward")
    }
    doubles = {name: sum(one.source.endswith(name) for one in rejected) for name in by_source}
    assert {name: len(rows) + doubles[name] for name, rows in by_source.items()} == {
        "chain_sum": 30,
        "spell_backward": 10,
    }
    assert {row.level for row in by_source["chain_sum"]} == {"3"}
    for one in by_source["chain_sum"]:
        expression = one.prompt.partition(": ")[2].removesuffix(" =")
        assert eval(expression) == int(one.answer)
    for one in by_source["spell_backward"]:
        assert len(one.answer) == int(one.level)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "gsm9k"}, "preset is 'gsm9k'; there is: gsm8k, jsonl, parquet, reasoning_gym"),
        ({"settings": {"pth": "x"}}, "settings.pth is unknown; allowed: path, name, prompt"),
        ({"prompt_template": "Question:"}, "must hold {prompt} once"),
        ({"presets": "jsonl"}, r"ingest.sources\[0\].presets is unknown"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_allowed(tmp_path, change, message):
    with pytest.raises(ParamsError, match=message):
        sources([{**entry(tmp_path / "a.jsonl"), **change}])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "chain_sums"}, "no task 'chain_sums'; it has: .*chain_sum"),
        ({"config": {"terms": 2}}, "allowed: min_terms"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_named(task, message):
    settings = {"seed": 0, "num_prompts": 2, "tasks": [{**CHAIN_SUM, **task}]}
    with pytest.raises(ParamsError, match=message):
        found([{"preset": "reasoning_gym", "settings": settings}])


def test_a_missing_file_and_a_missing_column_are_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"nowhere\.jsonl: No such file"):
        found([entry(tmp_path / "nowhere.jsonl")])
    pl.DataFrame({"q": ["a"]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ParamsError, match="no column 'gold'; it has: q"):
        found([{"preset": "parquet", "settings": {**JSONL, "path": str(tmp_path / "a.parquet"), "prompt": "q"}}])
    lines(tmp_path / "b.parquet", {"q": "a"})
    with pytest.raises(StageError, match=r"b\.parquet is not Parquet"):
        found([{"preset": "parquet", "settings": {**JSONL, "path": str(tmp_path / "b.parquet")}}])


def test_splits_depend_on_content_and_seed_not_on_order():
    rows = [row(f"problem {index}") for index in range(60)]
    one = split(rows, Sizes(30, 10, 15), 0, "none")
    assert {name: frame.height for name, frame in one.items()} == {"train": 30, "validation": 10, "test": 15}
    again = split(rows[::-1], Sizes(30, 10, 15), 0, "none")
    assert all(one[name].equals(again[name]) for name in one)
    other = split(rows, Sizes(30, 10, 15), 1, "none")
    assert set(one["test"]["prompt_id"]) != set(other["test"]["prompt_id"])
    everything = split(rows, Sizes(None, 10, 15), 0, "none")
    assert everything["train"].height == 35
    assert everything["test"].equals(one["test"])


def test_the_identity_of_a_prompt_is_its_content():
    same = prompt_id(row("a"))
    assert same == prompt_id(Row("elsewhere", 9, "x", "a", "1", "numeric", "3"))
    assert (
        len({same, prompt_id(row("b")), prompt_id(row("a", "2")), prompt_id(Row("", 1, "", "a", "1", "exact", ""))})
        == 4
    )


def test_splits_that_share_a_prompt_are_an_error():
    parts = {
        "train": PROMPTS.frame([PROMPTS.example]),
        "test": PROMPTS.frame([{**PROMPTS.example, "prompt": PROMPTS.example["prompt"].upper() + " "}]),
    }
    with pytest.raises(StageError, match="train and test share 1 prompts"):
        check_disjoint(parts)


def test_too_few_rows_say_the_numbers():
    with pytest.raises(StageError, match=r"need 6 prompts .* have 3; rejected: 4 duplicate"):
        split([row(text) for text in "abc"], Sizes(3, 1, 2), 0, "4 duplicate")
    with pytest.raises(ParamsError, match="test is 0"):
        split([row(text) for text in "abc"], Sizes(1, 1, 0), 0, "none")


def command(tmp_path: Path, ingest: dict) -> subprocess.CompletedProcess[str]:
    params = {"ingest": ingest, "tracking": {"uri": None, "experiment": "test", "log_weights": False}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    arguments = ["--params", str(tmp_path / "params.yaml"), "--data", str(tmp_path / "data")]
    return subprocess.run(
        [sys.executable, "-m", "tasks.ingest", *arguments], capture_output=True, text=True, check=False
    )


def test_the_command_writes_the_tables_the_same_every_time(tmp_path):
    generator = {"seed": 0, "num_prompts": 60, "tasks": [CHAIN_SUM]}
    broken = lines(tmp_path / "a.jsonl", {"question": "1 + 1?", "gold": None}, b"{")
    ingest = {
        "seed": 0,
        "splits": {"train": 30, "validation": 10, "test": 15},
        "sources": [{"preset": "reasoning_gym", "settings": generator}, entry(broken)],
    }
    layout, contents = Layout(tmp_path / "data"), []
    for _ in range(2):
        result = command(tmp_path, ingest)
        assert result.returncode == 0, result.stderr
        assert "1 empty_answer, 1 malformed" in result.stderr
        contents.append([layout.prompts(name).read_bytes() for name in ("train", "validation", "test", "rejected")])
    assert contents[0] == contents[1]
    frames = [PROMPTS.read(layout.prompts(name)) for name in ("train", "validation", "test")]
    assert [frame.height for frame in frames] == [30, 10, 15]
    assert pl.concat(frames)["prompt_id"].n_unique() == 55
    assert REJECTED.read(layout.prompts("rejected"))["reason"].to_list()[:2] == ["empty_answer", "malformed"]


@pytest.mark.real_data
@pytest.mark.skipif("WINNOW_REAL_DATA" not in os.environ, reason="WINNOW_REAL_DATA is not set")
def test_real_gsm8k():
    path = Path(os.environ["WINNOW_REAL_DATA"]) / "gsm8k" / "train.jsonl"
    kept, rejected = found([{"preset": "gsm8k", "settings": {"path": str(path)}}])
    assert len(kept) + len(rejected) == 7473
    first = json.loads(path.read_text().splitlines()[0])
    assert (kept[0].prompt, kept[0].answer) == (first["question"], "72")
    assert all(float(row.answer) is not None and "," not in row.answer for row in kept)
    assert sum(not row.prompt.isascii() for row in kept) > 300
    assert {one.reason for one in rejected} <= {"duplicate", "conflicting_answers"}


@pytest.mark.real_data
@pytest.mark.skipif("WINNOW_REAL_DATA" not in os.environ, reason="WINNOW_REAL_DATA is not set")
def test_real_math_rejects_its_four_empty_golds(tmp_path):
    records = json.loads((Path(os.environ["WINNOW_REAL_DATA"]) / "math_train" / "math.json").read_text())
    names = {"prompt": "problem", "answer": "answer", "level": "difficulty"}
    kept, rejected = found([entry(lines(tmp_path / "math.jsonl", *records), **names)])
    assert [one.line - 1 for one in rejected if one.reason == "empty_answer"] == [886, 1009, 5328, 5330]
    assert kept[0].level == "5"
