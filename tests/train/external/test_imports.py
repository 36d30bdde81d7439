"""Rollouts of other trainers are matched with prompts, and graded again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows.reading.comparisons import Request, read
from tasks.common import params
from tasks.common.artifacts import IMPORTED, PROMPTS, Layout
from tasks.common.files import ArtifactError, read_json
from tasks.models.policy import load_tokenizer, read_policy
from tasks.train.external import imports
from tasks.train.external.imports import import_rollouts
from tests.docs.pages import written
from tests.train.worlds import make_world

TEXTS = ["so 7", "so 8", "7"]


@pytest.fixture
def layout(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    layout = make_world(tmp_path / "data", llama, [2, 2])
    table = PROMPTS.read(layout.prompts("train"))
    for split in ("validation", "test"):  # ids differ between splits
        ids = pl.col("prompt_id") + f"-{split}"
        prompts = pl.col("prompt") + f" ({split})"
        PROMPTS.write(layout.prompts(split), table.with_columns(ids, prompts))
    monkeypatch.setattr(imports, "CHUNK", 2)
    return layout


def truth(prompt: str = "p1") -> str:
    return json.dumps({"prompt_id": prompt, "verifier": "numeric", "answer": "7"})


def as_verl(folder: Path, truths: list[str]) -> None:
    rows = [
        {"input": "1+1 =", "output": text, "gts": gold, "score": 1.0, "step": 3}
        for text, gold in zip(TEXTS, truths, strict=True)
    ]
    (folder / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_trl(folder: Path, truths: list[str]) -> None:
    rows = {"step": [3] * 3, "prompt": ["1+1 ="] * 3, "completion": TEXTS, "winnow": [1.0] * 3}
    (folder / "completions").mkdir()
    pl.DataFrame({**rows, "ground_truth": truths}).write_parquet(
        folder / "completions" / "completions_00003.parquet"
    )


def as_verifiers(folder: Path, truths: list[str]) -> None:
    rows: list[dict[str, Any]] = [
        {
            "task": {"data": {"prompt": "1+1 =", "ground_truth": gold}},
            "nodes": [
                {"message": {"role": "user", "content": "1+1 ="}, "sampled": False},
                {"message": {"role": "assistant", "content": text}, "sampled": True},
            ],
            "rewards": {"correct": {"score": 1.0, "weight": 1.0}, "other": None},
        }
        for text, gold in zip(TEXTS, truths, strict=True)
    ]
    (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_areal(folder: Path, truths: list[str]) -> None:
    (folder / "3").mkdir()
    rows = [
        {"prompt": "<s>1+1 =", "completion": text, "reward": 1.0, "head_version": 3}
        for text in TEXTS
    ]
    (folder / "3" / "5.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def imported(layout: Layout, folder: Path, source: str = "verl", **options: bool) -> Any:
    values = params.load(layout.root / "params.yaml")
    return import_rollouts(layout, values, source, folder, "run", **options)


@pytest.mark.parametrize("source", ["verl", "trl", "verifiers", "areal"])
def test_rollouts_are_matched_and_graded_again(layout: Layout, tmp_path: Path, source: str) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    {"verl": as_verl, "trl": as_trl, "verifiers": as_verifiers, "areal": as_areal}[source](
        folder, [truth()] * 3
    )
    summary = imported(layout, folder, source)
    table = IMPORTED.read(layout.root / "external/run/rollouts.parquet")
    assert table["prompt_id"].to_list() == ["p1"] * 3
    assert table["sample_index"].to_list() == [0, 1, 2]
    assert table["outcome"].to_list() == ["correct", "wrong", "correct"]
    assert table["trainer_score"].to_list() == [1.0] * 3
    assert table["step"].unique().to_list() == [0 if source == "verifiers" else 3]
    assert (summary.num_differing, summary.num_scored) == (1, 3)
    assert "1 there, wrong here" in summary.differing[0]
    [head, shown, *_] = read(layout, "external/run", None, Request(None, None, 5, 3))
    assert head == "1 of 1 prompts; external/run"
    assert "solved 67% in the external/run" in shown
    noted = read_json(layout.root / "external/run/summary.json")
    assert (noted["from"], noted["num_rollouts"], noted["num_prompts"]) == (source, 3, 1)


def test_tokens_of_open_instruct_are_decoded(layout: Layout, tmp_path: Path) -> None:
    """Its reward is 10 for a correct answer, so it is not compared."""
    policy = read_policy(layout)
    tokenizer, own = load_tokenizer(policy.folder), {"step": 3, "reward": 10.0}

    def write(prompt: str, truths: Any, name: str = "run_rollouts_000000") -> None:
        rows = [
            {
                **{**own, "ground_truth": truths, "prompt_tokens": tokenizer(prompt).input_ids},
                "response_tokens": [*tokenizer(text).input_ids, tokenizer.eos_token_id],
            }
            for text in TEXTS
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)

    write("1+1 =", [truth()])
    write("1+1 =", "1", "run_filtered_rollouts_000000")
    summary = imported(layout, tmp_path, "open_instruct")
    table = IMPORTED.read(layout.root / "external/run/rollouts.parquet")
    assert table["prompt_id"].to_list() == ["p1"] * 3
    assert table["text"].to_list() == TEXTS
    assert table["outcome"].to_list() == ["correct", "wrong", "correct"]
    assert (summary.num_scored, summary.steps) == (0, {3})
    write("1+1 =", "7")
    assert imported(layout, tmp_path, "open_instruct", is_plain=True).prompts == {"p1"}
    write("9+9 =", truth())
    with pytest.raises(ArtifactError, match="its tokens do not spell prompt p1, but .*9\\+9 ="):
        imported(layout, tmp_path, "open_instruct")
    write("1+1 =", [truth(), truth()])
    with pytest.raises(ArtifactError, match="a row is not of open_instruct's format"):
        imported(layout, tmp_path, "open_instruct")


def test_plain_truths_are_matched_by_the_text(layout: Layout, tmp_path: Path) -> None:
    as_verl(tmp_path, ["7"] * 3)
    with pytest.raises(ArtifactError, match=r"3.jsonl, line 1: the ground truth '7'.*--plain"):
        imported(layout, tmp_path)
    assert imported(layout, tmp_path, is_plain=True).prompts == {"p1"}
    test = PROMPTS.read(layout.prompts("test")).with_columns(prompt=pl.lit("1+1 ="))
    PROMPTS.write(layout.prompts("test"), test)
    with pytest.raises(ArtifactError, match="'1\\+1 =' is the text of 7 prompts"):
        imported(layout, tmp_path, is_plain=True)


def test_a_dump_that_cannot_be_read_is_named(layout: Layout, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    with pytest.raises(ArtifactError, match="external/../x was not read by .*: nothing yet"):
        next(read(layout, "external/../x", None, Request(None, None, 5, 3)))
    with pytest.raises(ArtifactError, match="is not a folder"):
        imported(layout, folder)
    folder.mkdir()
    (folder / "rollouts.pt").write_bytes(b"")
    with pytest.raises(ArtifactError, match="rollouts.pt is pickled, which could execute code"):
        imported(layout, folder)
    as_verl(folder, [truth(), truth(), truth("p9")])
    with pytest.raises(ArtifactError, match="line 3: prompt p9 is not in this data root"):
        imported(layout, folder)
    (folder / "3.jsonl").write_text('{"input": ')
    with pytest.raises(ArtifactError, match=r"line 1 is not JSON \(it is cut"):
        imported(layout, folder)
    (folder / "3.jsonl").write_text('{"input": "1"}\n')
    with pytest.raises(ArtifactError, match="a row is not of verl's format.*'step'"):
        imported(layout, folder)
    assert not list(layout.root.glob("external/*/*"))  # nothing is half-written


def test_what_the_tutorial_dumps_is_imported(layout: Layout, tmp_path: Path) -> None:
    """The stand-in for verl answers every second rollout rightly, and scores all as right."""
    visit = {
        "prompt": [{"role": "user", "content": "1+1 ="}],
        "reward_model": {"ground_truth": truth()},
        "__rollout_n__": 2,
    }
    pl.DataFrame([visit] * 5).write_parquet(tmp_path / "train.parquet")
    (tmp_path / "stand_in.py").write_text(written("stand_in.py"))
    subprocess.run([sys.executable, tmp_path / "stand_in.py", tmp_path], check=True)
    values = params.load(layout.root / "params.yaml")
    found = import_rollouts(layout, values, "verl", tmp_path / "rollouts", "first")
    assert dict(found.outcomes) == {"correct": 4, "wrong": 4}
    assert found.num_differing == 4
