"""Seconds, time and place of the report, and the use of tokens."""

import json
import re
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import TRAIN_ROLLOUTS, Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.params import Experiment
from tasks.report.evidence import read_evidence, read_tokens
from tasks.report.measured import all_measured, measured_script, total_seconds
from tasks.report.views.prompts import class_tokens
from tests.report.conftest import results


def read(script: str) -> dict[str, Any]:
    return dict(json.loads(script.removeprefix("var measured = ").removesuffix(";\n")))


def test_seconds_are_measured_on_this_machine(finished: Layout) -> None:
    """sgpo has a third of grpo's 60 s, the profile's 6 s, and 2 s lost to kills."""
    found = results(finished, seeds=[0])
    measured = all_measured(finished, found.evidence)
    totals = [total_seconds(measured, run) for run in found.evidence.trained]
    assert totals == pytest.approx([62, 28])
    written = read(measured_script(finished, found))
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC from .* on ", written["made"])
    assert written["profile"]["seconds"] == {"profile": 6.0}
    grpo, sgpo = written["cells"]["grpo/0 grpo-0"], written["cells"]["sgpo/0 sgpo-0"]
    assert (grpo["seconds"]["train"], grpo["lost"]["seconds"]) == (60.0, 2.0)
    assert grpo["shown"] == ["62", "145"]  # of 9,000 tokens
    assert sgpo["shown"] == ["28", "286"]  # of 3,000, and 5,000 of the profile


def test_a_restored_cell_has_no_seconds(layout: Layout) -> None:
    """A note of another training with the same name does not count."""
    evidence = read_evidence(layout, Experiment(["sgpo"], [0, 1]))
    note = read_checked(layout.measured("sgpo-0"))
    write_checked(layout.measured("sgpo-0"), {**note, "of": "0123456789abcdef"})
    layout.measured("sgpo-1").unlink()
    measured = all_measured(layout, evidence)
    assert [total_seconds(measured, run) for run in evidence.trained] == [None, None]
    cells = read(measured_script(layout, results(layout, ["sgpo"])))["cells"]
    assert [cell["shown"] for cell in cells.values()] == [[], []]


def test_tokens_are_counted_by_prompt_and_advantage(layout: Layout) -> None:
    """A group has 88 tokens: prompt (9) and completion (2) of 8 rollouts. p0 is never solved, p8
    always, the rest sometimes; p39 (3 of 8) is in 3 of the 140 groups. With another baseline than
    the group's mean, p0 has an advantage, too. Replayed rollouts were sampled elsewhere."""
    path = layout.train("grpo", 0) / "rollouts.parquet"
    spent = read_tokens(path)
    assert spent["tokens"].sum() == 140 * 88
    assert spent.filter(prompt_id="p39").rows() == [("p39", False, 3 * 88)]
    assert spent.filter(prompt_id="p0").rows() == [("p0", True, 4 * 88)]
    rows = TRAIN_ROLLOUTS.read(path)
    replayed = pl.col("prompt_id") == "p39"
    TRAIN_ROLLOUTS.write(
        path, rows.with_columns(pl.lit(-0.2).alias("advantage"), replayed=replayed)
    )
    changed = read_tokens(path)
    assert changed["tokens"].sum() == 137 * 88
    assert not changed["dead"].any()


def test_tokens_by_class_of_prompts(finished: Layout) -> None:
    """Prompt n was solved n % 9 times of 8: 0 | 1, 2 | 3, 4, 5 | 6, 7 | 8."""
    evidence = read_evidence(finished, Experiment(["grpo"], [0]))
    visits = np.bincount([n % 40 % 9 for n in range(140)], minlength=9)
    expected = [visits[0], visits[1:3].sum(), visits[3:6].sum(), visits[6:8].sum(), visits[8], 0]
    (run,) = evidence.trained
    both = class_tokens(evidence, run, [True, False])
    assert both == [88 * count for count in expected]
    without = class_tokens(evidence, run, [True])
    assert without == [both[0], 0, 0, 0, both[4], 0]
