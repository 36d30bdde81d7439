"""The settings that `winnow init` drafts for a file: fields, verifier, splits."""

from pathlib import Path

import pytest

from tasks.common.params import ParamsError
from tasks.ingest.drafts import draft, verifier_for
from tests.ingest.helpers import lines


@pytest.mark.parametrize(
    ("golds", "verifier"),
    [
        (["7", "-1,250", "3.5", "$12", "40%"], "numeric"),
        (["A", "(B)", "D"], "choice"),
        ([r"\frac{1}{2}", "3", "x^2 + 1", "1/2"], "math"),
        (["Paris", "the Nile", "7"], "exact"),
        (["7"] * 19 + ["seven"], "numeric"),
        (["7"] * 18 + ["seven"] * 2, "exact"),
    ],
)
def test_verifier_is_chosen_by_the_form_of_most_answers(golds: list[str], verifier: str) -> None:
    assert verifier_for(golds) == verifier


def rows(path: Path, number: int, **changed: object) -> str:
    found = [{"problem": f"{n} + 1 = ?", "gold": str(n + 1), **changed} for n in range(number)]
    return str(lines(path / "mine.jsonl", *found))


def test_file_with_usual_names_fills_its_splits(tmp_path: Path) -> None:
    path = rows(tmp_path, 40)
    entry, splits = draft(path, None, None, 100)
    assert entry["preset"] == "mapping"
    fields = {"prompt": "problem", "answer": "gold", "level": None, "verifier": "numeric"}
    assert entry["settings"] == {"path": path, "name": "mine", **fields}
    assert splits == {"train": None, "validation": 4, "test": 8}
    assert draft(path, "mapping", None, 100) == (entry, splits)


def test_worked_solutions_and_choices_are_recognized(tmp_path: Path) -> None:
    path = rows(tmp_path, 10, gold="3 + 4 = 7\n#### 7")
    entry, _ = draft(path, None, None, 100)
    assert (entry["settings"]["extract"], entry["settings"]["verifier"]) == ("####", "numeric")
    entry, _ = draft(rows(tmp_path, 10, gold=1, choices=["3", "4"]), None, None, 100)
    assert (entry["settings"]["options"], entry["settings"]["verifier"]) == ("choices", "choice")


def test_presets_and_published_sets_are_drafted_by_name(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"problem": f"{n}?", "answer": "1"} for n in range(10)))
    entry, _ = draft(str(path), "aime", None, 100)
    assert entry == {"preset": "published", "settings": {"set": "aime", "path": str(path)}}
    solved = ({"question": f"{n}?", "answer": "#### 1"} for n in range(10))
    path = lines(tmp_path / "b.jsonl", *solved)
    assert draft(str(path), "gsm8k", None, 100)[0]["preset"] == "gsm8k"
    asked = ({"prompt": f"{n}?", "reward_model": {"ground_truth": 1}} for n in range(10))
    path = lines(tmp_path / "c.jsonl", *asked)
    assert draft(str(path), "verl", None, 100)[0]["settings"] == {"path": str(path), "level": None}


def test_own_file_of_a_preset_is_recognized_unless_fields_are_named(tmp_path: Path) -> None:
    solved = ({"question": f"{n}?", "answer": "6/2=<<6/2=3>>3\n#### 3"} for n in range(10))
    path = str(lines(tmp_path / "train.jsonl", *solved))
    assert draft(path, None, None, 100)[0] == {"preset": "gsm8k", "settings": {"path": path}}
    for preset, fields in (("mapping", None), (None, ["question", "answer"])):
        assert draft(path, preset, fields, 100)[0]["preset"] == "mapping"


def test_unusable_files_are_named(tmp_path: Path) -> None:
    path = rows(tmp_path, 40)
    with pytest.raises(ParamsError, match="has the fields problem, gold: .* --fields QUESTION"):
        draft(path, None, ["problem", "answer"], 100)
    with pytest.raises(ParamsError, match=r"has 0 different questions .* \(the prompt has 9 char"):
        draft(path, None, None, 3)
    with pytest.raises(ParamsError, match="has the fields q: name those of question and answer"):
        draft(str(lines(tmp_path / "a.jsonl", {"q": "1?"})), None, None, 100)
    with pytest.raises(ParamsError, match="has no row that can be read"):
        draft(str(lines(tmp_path / "b.jsonl")), None, None, 100)
