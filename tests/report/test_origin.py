"""When and where the page was made, why stages sampled, and where tokens went."""

import re

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import TRAIN_ROLLOUTS, Layout
from tasks.common.params import Experiment
from tasks.common.sealed import write_sealed
from tasks.report.evidence import read_evidence, read_tokens
from tasks.report.origin import commit_words, notes, origin_of, run_notes
from tasks.report.prompts import class_tokens
from tasks.report.tables import why_table


def test_the_page_says_when_from_which_commit_and_where(layout: Layout) -> None:
    made = origin_of(layout).made
    assert list(made) == ["made", "commit", "machine"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", made["made"])


@pytest.mark.parametrize(
    ("git", "words"),
    [
        ("0123456789abcdef", "0123456789"),
        ("0123456789abcdef-dirty", "0123456789, with changes"),
        (None, "no git repository"),
    ],
)
def test_the_commit_in_words(git: str | None, words: str) -> None:
    assert commit_words({} if git is None else {"git": git}) == words


def test_stages_say_why_they_sampled(layout: Layout) -> None:
    assert notes(layout) == []
    note = {"asked": {}, "said": "8 rollouts reused, 4 sampled: policy digest changed"}
    write_sealed(layout.sampling_note("profile"), {"sampled": note})
    layout.sampling_note("baseline").write_text("half a fi")
    write_sealed(layout.sampling_note("evaluate@a-0"), {"sampled": {"asked": {}}})
    assert notes(layout) == [("profile", "sampled", note["said"])]


def test_stages_say_when_and_why_they_ran(layout: Layout) -> None:
    ran = {"outcome": "ran", "why": "train.learning_rate 0.0003 -> 0.0001 <b>"}
    write_sealed(layout.run_note("train@a-0"), {**ran, "when": "2026-01-02 10:00 UTC"})
    write_sealed(layout.run_note("code"), {**ran, "when": "2026-01-02 09:00 UTC"})
    layout.run_note("profile").write_text("half a fi")
    write_sealed(layout.run_note("baseline"), {"when": "2026-01-02 09:00 UTC"})
    found = run_notes(layout)
    assert [(one[0], one[1][11:16]) for one in found] == [("code", "09:00"), ("train@a-0", "10:00")]
    table = why_table(found, [])
    assert "train.learning_rate 0.0003 -&gt; 0.0001 &lt;b&gt;" in table
    assert why_table([], []) == "<p>No stage left a note.</p>"


def test_tokens_are_counted_by_prompt_and_signal(layout: Layout) -> None:
    """Prompt (9) and completion tokens (2) of 8 rollouts: 88 a group. p0 is never solved, p8
    always, the rest sometimes; p39 (3 of 8) stands in 3 of the 140 groups. A group of right answers
    and errors has no signal, and replayed rollouts were sampled elsewhere."""
    path = layout.train("grpo", 0) / "rollouts.parquet"
    spent = read_tokens(path)
    assert spent["tokens"].sum() == 140 * 88
    assert spent.filter(prompt_id="p39").rows() == [("p39", True, 3 * 88)]
    assert spent.filter(prompt_id="p0").rows() == [("p0", False, 4 * 88)]
    rows = TRAIN_ROLLOUTS.read(path)
    outcomes = pl.when(pl.col("outcome") == "wrong").then(pl.lit("error")).otherwise("outcome")
    replayed = pl.col("prompt_id") == "p39"
    TRAIN_ROLLOUTS.write(path, rows.with_columns(outcome=outcomes, replayed=replayed))
    changed = read_tokens(path)
    assert changed["tokens"].sum() == 137 * 88
    assert not changed["mixed"].any()


def test_tokens_by_class_of_prompts(layout: Layout) -> None:
    """Prompt n was solved n % 9 times of 8: 0 | 1, 2 | 3, 4, 5 | 6, 7 | 8."""
    evidence = read_evidence(layout, Experiment(["grpo"], [0]))
    visits = np.bincount([n % 40 % 9 for n in range(140)], minlength=9)
    expected = [visits[0], visits[1:3].sum(), visits[3:6].sum(), visits[6:8].sum(), visits[8], 0]
    (run,) = evidence.trained
    both = class_tokens(evidence, run, [True, False])
    assert both == [88 * count for count in expected]
    without = class_tokens(evidence, run, [False])
    assert without == [both[0], 0, 0, 0, both[4], 0]
