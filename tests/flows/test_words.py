"""Reasons, selection and the graph, without running anything."""

from pathlib import Path

import pytest
import yaml

from flows import commands, reasons, selection
from tasks.common import changes
from tests.flows.project import ROOT

LOCK = {
    "ingest": {"outs": [{"path": "data/prompts/train.parquet", "md5": "91c0ffee"}]},
    "profile": {
        "deps": [
            {"path": "data/prompts/train.parquet", "md5": "3f2abcde"},
            {"path": "tasks/profile", "md5": "0000.dir"},
        ],
        "params": {"params.yaml": {"profile": {"num_samples": 8, "old": [1]}}},
        "outs": [],
    },
}
NEEDS: dict[str, set[str]] = {
    "ingest": set(),
    "baseline": {"ingest"},
    "allocate@a": {"ingest"},
    "allocate@b-c": {"ingest"},
    "evaluate@a-0": {"allocate@a"},
    "evaluate@a-1": {"allocate@a"},
    "evaluate@b-c-0": {"allocate@b-c"},
    "evaluate@b-c-1": {"allocate@b-c"},
    "report": {"baseline", "evaluate@a-0", "evaluate@a-1", "evaluate@b-c-0", "evaluate@b-c-1"},
}


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        ({"changed deps": {"tasks/profile": "modified"}}, ["code tasks/profile changed"]),
        (
            {"changed deps": {"params.yaml": {"profile": "modified"}}},
            ["profile.num_samples 8 -> 9", "profile.old [1] -> (none)"],
        ),
        (
            {"changed deps": {"data/prompts/train.parquet": "modified"}},
            ["data/prompts/train.parquet 3f2a -> 91c0"],
        ),
        (
            {"changed deps": {"data/prompts/train.parquet": "deleted"}},
            ["input missing: data/prompts/train.parquet"],
        ),
        ({"changed deps": {"data/runs": "modified"}}, ["data/runs changed"]),
        (
            {"changed outs": {"data/x": "deleted", "data/y": "not in cache"}},
            ["output missing: data/x and 1 more"],
        ),
        ({"changed outs": {"data/x": "modified"}}, ["output changed since: data/x"]),
        ("changed command", ["command changed"]),
    ],
)
def test_reasons_name_what_differs(change: object, phrases: list[str], tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("profile: {num_samples: 9}")
    assert reasons.explain("profile", [change], LOCK, tmp_path) == phrases


def test_a_stage_without_a_lock_entry_has_never_run(tmp_path: Path) -> None:
    assert reasons.explain("train@sgpo-0", ["changed command"], LOCK, tmp_path) == ["never run"]


def test_long_values_are_cut() -> None:
    assert changes.show(list(range(100))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13..."


def test_everything_is_selected_by_default_in_order() -> None:
    ordered, left_out = selection.select(NEEDS, [], None, None)
    assert left_out == []
    assert [ordered[0], ordered[-1]] == ["ingest", "report"]
    assert all(
        ordered.index(need) < ordered.index(stage) for stage in NEEDS for need in NEEDS[stage]
    )


def test_a_recipe_and_a_seed_select_a_cell_and_what_it_needs() -> None:
    ordered, left_out = selection.select(NEEDS, ["evaluate@a-0"], ["b-c"], ["1"])
    assert ordered == ["ingest", "allocate@b-c", "evaluate@b-c-1"]
    assert "report" in left_out


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(
        selection.SelectionError, match=r"recipe dapo is not in the experiment: it has a, b-c"
    ):
        selection.select(NEEDS, [], ["dapo"], None)


def test_the_report_stays_when_the_other_cells_are_up_to_date() -> None:
    ordered, left_out = selection.select(NEEDS, ["evaluate@b-c-1", "report"], ["b-c"], None)
    assert ordered == [
        "ingest",
        "baseline",
        "allocate@b-c",
        "evaluate@b-c-0",
        "evaluate@b-c-1",
        "report",
    ]
    assert left_out == ["allocate@a", "evaluate@a-0", "evaluate@a-1"]


def test_coordinates_split_at_the_last_dash() -> None:
    assert selection.coordinates("evaluate@b-c-1") == ("evaluate", "b-c", 1)
    assert selection.coordinates("allocate@b-c") == ("allocate", "b-c", None)
    assert selection.coordinates("profile") == ("profile", None, None)


def test_the_graph_is_read_from_dot() -> None:
    dot = 'strict digraph {\n"a";\n"b@x-0";\n"a" -> "b@x-0";\n}\n'
    assert commands.parse_graph(dot) == {"a": set(), "b@x-0": {"a"}}


def test_every_command_takes_the_shells_place() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert all(
        stage["cmd"].startswith(f"exec python -m tasks.{name} ") for name, stage in stages.items()
    )


def test_the_pipeline_has_the_edges_of_its_picture() -> None:
    needs = commands.graph()
    assert needs["profile"] == {"ingest", "policy"}
    assert needs["train@sgpo-0"] == {"ingest", "policy", "allocate@sgpo"}
    assert needs["evaluate@sgpo-0"] == {"ingest", "policy", "train@sgpo-0"}
    assert {"baseline", "profile", "allocate@grpo", "train@grpo-0", "evaluate@sgpo-0"} <= needs[
        "report"
    ]
