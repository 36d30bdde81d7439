"""Metrics of graded rollouts, by source and level."""

from pathlib import Path
from typing import Any

import pytest

from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout
from tasks.common.files import ArtifactError
from tasks.common.stage import Stage
from tasks.evaluate.evaluation import Tally, measure, run_evaluation
from tasks.evaluate.settings import Evaluate
from tests.parameters import every_value

SETTINGS = Evaluate(num_samples=2, pass_at=[1, 2], num_bootstrap=10)


def measured(*prompts: tuple[str, str, str]) -> dict[str, Any]:
    """Return the metrics of prompts with (source, level, outcomes): C correct, W wrong, E error;
    two samples and the greedy one."""
    words = {"C": "correct", "W": "wrong", "E": "error"}
    rows, rollouts = [], []
    for number, (source, level, outcomes) in enumerate(prompts):
        rows.append(
            {**PROMPTS.example, "prompt_id": f"p{number}", "source": source, "level": level}
        )
        for sample, outcome in enumerate(outcomes):
            changes = {
                "sample_index": sample % 2,
                "greedy": sample == 2,
                "reward": float(outcome == "C"),
            }
            row = {"prompt_id": f"p{number}", "outcome": words[outcome]}
            rollouts.append({**ROLLOUTS.example, **row, **changes})
    tally = Tally()
    for part in ROLLOUTS.frame(rollouts).partition_by("greedy", maintain_order=True):
        tally.add(part)
    return measure(tally, PROMPTS.frame(rows), SETTINGS)


def levels_of(*prompts: tuple[str, str, str]) -> dict[str, tuple[int, float, float]]:
    """Return the number of prompts, pass@1 and greedy accuracy of each part."""
    levels = measured(*prompts)["levels"]
    return {
        name: (part["num_prompts"], part["pass_at_1"], part["greedy"])
        for name, part in levels.items()
    }


def test_an_evaluation_without_prompts_is_refused(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    PROMPTS.write(layout.prompts("test"), PROMPTS.frame([]))
    values = every_value()
    run = Stage.unrecorded("baseline", values, layout)
    with pytest.raises(ArtifactError, match=r"test.parquet has no prompts, but baseline measures"):
        run_evaluation(run, None, tmp_path / "out")  # type: ignore[arg-type]


@pytest.mark.parametrize(("outcomes", "what"), [("WWE", "greedy completion"), ("EEW", "sample")])
def test_an_evaluation_without_a_graded_answer_is_refused(outcomes: str, what: str) -> None:
    with pytest.raises(ArtifactError, match=f"no {what} of any test prompt could be graded"):
        measured(("math", "1", outcomes))


def test_levels_of_one_source() -> None:
    found = levels_of(("math", "1", "CCC"), ("math", "1", "CWW"), ("math", "2", "WEC"))
    assert found == {"1": (2, pytest.approx(0.75), pytest.approx(0.5)), "2": (1, 0.0, 1.0)}


def test_levels_of_several_sources_are_separate() -> None:
    found = levels_of(
        ("math", "1", "CCC"), ("gsm8k", "1", "CWW"), ("math", "2", "WWC"), ("svamp", "", "CCW")
    )
    assert found == {
        "gsm8k": (1, 0.5, 0.0),
        "gsm8k 1": (1, 0.5, 0.0),
        "math": (2, 0.5, 1.0),
        "math 1": (1, 1.0, 1.0),
        "math 2": (1, 0.0, 1.0),
        "svamp": (1, 1.0, 0.0),
    }
    assert list(found) == sorted(found)


def test_a_policy_that_solves_nothing_has_an_interval() -> None:
    """0 of 10 prompts: up to 3.84 / 13.84, for the samples and for the greedy ones."""
    metrics = measured(*[("math", "1", "WWW")] * 10)
    for name in ("pass_at_1", "greedy"):
        interval = (metrics[f"{name}_low"], metrics[f"{name}_high"])
        assert (metrics[name], interval) == (0.0, (0.0, pytest.approx(0.2775, abs=1e-4)))
