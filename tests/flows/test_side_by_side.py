"""Stages side by side: their order, their GPUs, and their output."""

from typing import Any

import pytest

from flows.pipeline.selection import sorter
from flows.pipeline.side_by_side import Placing
from tests.flows.project import Project, lines
from tests.flows.test_pipeline import task_runs

NEEDS = {"data": set(), "a": {"data"}, "b": {"data"}, "ab": {"a", "b"}, "end": {"ab"}}


def test_stages_of_other_runs_are_ignored() -> None:
    assert sorter({stage: NEEDS[stage] for stage in ("ab", "end")}).get_ready() == ("ab",)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the section `engine` of a machine with the GPUs 4, 5 and 7."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    return {"device": "auto", "num_processes": 1, "num_replicas": 1}


def test_each_stage_has_its_own_gpu(engine: dict[str, Any]) -> None:
    placing = Placing.of({"engine": engine}, 4)
    assert placing.take("allocate@grpo-0") == []
    taken = [placing.take(f"train@grpo-{seed}") for seed in range(3)]
    assert taken == [["4"], ["5"], ["7"]]
    assert placing.environment(["5"]) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert placing.environment([]) == {}
    placing.users.subtract(["5"])
    assert placing.take("evaluate@grpo-0") == ["5"]
    assert placing.take("profile") == ["4"]  # all are in use: the stage waits for its lock


@pytest.mark.parametrize(
    ("changes", "concurrency", "taken"),
    [
        ({}, 1, ["4"]),
        ({"num_processes": 2}, 4, ["4", "5"]),
        ({"num_replicas": 3}, 4, ["4", "5", "7"]),
        ({"name": "server", "num_replicas": 1}, 4, ["4", "5"]),
        ({"device": "cpu"}, 4, []),
    ],
)
def test_gpus_of_a_stage_without_its_own(
    changes: dict[str, Any], concurrency: int, taken: list[str], engine: dict[str, Any]
) -> None:
    placing = Placing.of({"engine": {**engine, **changes}}, concurrency)
    assert placing.take("train@grpo-0") == taken
    assert placing.environment(taken) == {}


def test_empty_section_is_the_default(engine: dict[str, Any]) -> None:
    stage = "train@grpo-0"
    assert Placing.of({"engine": None}, 1).take(stage) == Placing.of({}, 1).take(stage)


def test_failed_cell_does_not_stop_the_others(project: Project) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.behave(train__grpo_0="meet", train__winnow_0="meet", allocate__sgpo_0="fail")
    project.environment["CUDA_VISIBLE_DEVICES"] = "4,7"
    output = project.flow("--concurrency", "3", expect=1)
    assert "failed: allocate@sgpo-0;" in output
    assert lines(output, "not run") == ["train@sgpo-0", "evaluate@sgpo-0", "report"]
    assert len(lines(output, "ran")) == 7
    assert "\ntrain@grpo-0 | this is train@grpo-0, live\n" in output
    assert set(project.status()) == {"allocate@sgpo-0", "train@sgpo-0", "report"}
    tags = {task["name"]: task["tags"] for task in task_runs(project)}
    assert tags["allocate@winnow-0"] == ["device:cpu"]
    for stage in ("train@grpo-0", "train@winnow-0"):
        (tag,) = tags[stage]
        assert f"\n{stage} | GPUs: {tag.removeprefix('device:cuda:')}\n" in output
    devices = {"device:cpu", "device:cuda:4", "device:cuda:7"}
    assert {tag for name in tags for tag in tags[name]} == devices
