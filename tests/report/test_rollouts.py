"""Rollouts on the page: the chosen prompts and samples, and the file beside the page."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout
from tasks.common.files import ArtifactError
from tasks.report import answers
from tasks.report.answers import (
    CHANGES,
    TO_READ,
    change_of,
    choose,
    cut,
    picked,
    read_parts,
    shown_runs,
    write_rollouts,
)
from tasks.report.paired import CLASSES, Paired
from tasks.report.views.prompts import matrix
from tests.report.conftest import results


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (0.0, 0.5, "newly solved"),
        (0.5, 0.75, "better"),
        (0.5, 0.25, "worse"),
        (0.5, 0.0, "lost"),
        (0.5, 0.5, "same"),
        (1.0, 1.0, "always solved"),
        (0.0, 0.0, "never solved"),
        (None, 0.5, None),
        (0.5, None, None),
    ],
)
def test_classes_of_change(before: float | None, after: float | None, change: str | None) -> None:
    assert change_of(before, after) == change
    assert change is None or change in CHANGES


def test_prompts_are_chosen_across_the_classes() -> None:
    """Of classes of 3 and 100 prompts, it chooses 3 and 7, in any order of the table."""
    changes: dict[str, str | None] = {f"a{n:03}": "same" for n in range(100)}
    changes |= {f"b{n}": "lost" for n in range(3)}
    chosen = choose(changes, 10)
    assert sorted(chosen) == [*(f"a{n:03}" for n in range(7)), "b0", "b1", "b2"]
    assert choose(dict(reversed(changes.items())), 10) == chosen
    assert len(choose(changes, 200)) == 103


def test_one_run_per_recipe_is_shown_with_the_champion_first() -> None:
    rows: list[dict[str, Any]] = [
        {"recipe": "a", "seed": 0, "validation": 0.5},
        *({"recipe": "b", "seed": seed, "validation": 0.4} for seed in (1, 0)),
        {"recipe": "a", "seed": 1, "validation": 0.6},
        *({"recipe": name, "seed": 0, "validation": 0.1} for name in "cdef"),
    ]
    assert shown_runs(rows, None) == ["a/1", "b/0", "c/0", "d/0"]
    assert shown_runs(rows, {"recipe": "d", "seed": 0}) == ["d/0", "a/1", "b/0", "c/0"]


def sample(index: int, outcome: str, *, greedy: bool = False) -> dict[str, Any]:
    return {**ROLLOUTS.example, "sample_index": index, "outcome": outcome, "greedy": greedy}


def test_a_sample_of_each_outcome_is_shown() -> None:
    rows = [sample(n, "wrong") for n in range(8)] + [sample(8, "correct"), sample(9, "truncated")]
    rows.append(sample(0, "wrong", greedy=True))
    found = picked(ROLLOUTS.frame(rows))
    assert [(one["greedy"], one["index"], one["outcome"]) for one in found] == [
        (True, 0, "wrong"),
        (False, 0, "wrong"),
        (False, 8, "correct"),
        (False, 9, "truncated"),
    ]


def test_a_long_text_is_cut_in_the_middle() -> None:
    assert cut("x" * 1500) == "x" * 1500
    long = cut("a" * 2000 + "b" * 2000)
    assert long == "a" * 750 + "\n[… 2,500 characters left out …]\n" + "b" * 750


def test_the_file_has_all_rollouts_and_the_page_a_part(finished: Layout, tmp_path: Path) -> None:
    path, both = tmp_path / "rollouts.parquet", results(finished, num_bootstrap=10)
    found = write_rollouts(path, finished, both, ["sgpo/1", "grpo/0"])
    table = TO_READ.read(path)
    assert len(table) == 5 * 256 * 9
    policies = table["policy"].unique(maintain_order=True).to_list()
    assert policies == ["initial", "grpo/0", "grpo/1", "sgpo/0", "sgpo/1"]
    row = table.row(
        by_predicate=(pl.col("policy") == "sgpo/1")
        & (pl.col("prompt_id") == "t7")
        & pl.col("greedy"),
        named=True,
    )
    assert (row["prompt"], row["gold"], row["outcome"]) == ("Question 7: 3 + 4 =", "7", "wrong")
    assert (found["total"], len(found["prompts"])) == (256, 200)
    for prompt in found["prompts"]:
        assert list(prompt["policies"]) == ["initial", "sgpo/1", "grpo/0"]
        graded = table.filter(pl.col("prompt_id") == prompt["id"], ~pl.col("greedy"))
        for name, policy in prompt["policies"].items():
            outcomes = graded.filter(pl.col("policy") == name)["outcome"]
            assert policy["rate"] == (outcomes == "correct").mean()
            assert len(policy["samples"]) == 4


def test_the_parts_add_up_to_the_file(finished: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BYTES_PER_PART", 100)
    path = finished.baseline / "rollouts.parquet"
    found = list(read_parts(path))
    assert len(found) > 10
    whole = ROLLOUTS.read(path)
    assert pl.concat(found).equals(whole.select(found[0].columns))


def test_a_rollout_without_its_prompt_is_an_error(layout: Layout, tmp_path: Path) -> None:
    prompts = PROMPTS.read(layout.prompts("test")).filter(pl.col("prompt_id") != "t9")
    PROMPTS.write(layout.prompts("test"), prompts)
    both = results(layout, num_bootstrap=10)
    with pytest.raises(ArtifactError, match=r"rollouts\.parquet: prompt t9 is not among the test"):
        write_rollouts(tmp_path / "r.parquet", layout, both, ["grpo/0"])
    assert not (tmp_path / "r.parquet").exists()


def test_the_transition_matrix() -> None:
    """It is the mean of two seeds; a prompt without grades is excluded for its seed."""
    rates = pl.DataFrame(
        {
            "prompt_id": ["a", "b", "c", "d"],
            "initial": [0.0, 0.0, 0.5, 1.0],
            "r/0": [0.25, 0.0, 1.0, 1.0],
            "r/1": [1 / 3, 7 / 8, None, 2 / 3],
        }
    )
    found = matrix(Paired(rates, 10), ["r/0", "r/1"])
    assert len(CLASSES) == 5
    expected = [[0.0] * 5 for _ in range(5)]
    expected[0] = [0.5, 1.0, 0.0, 0.5, 0.0]  # a: to 1/3 for both seeds; b: 0, then below 1
    expected[2][4] = 0.5
    expected[4] = [0.0, 0.0, 0.5, 0.0, 0.5]
    assert found == expected
