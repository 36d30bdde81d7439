"""Reasons, selection and the graph, without running anything."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows.doctor import health
from flows.pipeline import commands, reasons, selection, stages, summary
from flows.pipeline.roots import Root
from flows.serve import server
from tasks.common.checksums import write_checked
from tasks.common.config import changes
from tasks.common.files import ArtifactError, write_json
from tests.flows.project import ROOT

LOCK = {
    "ingest": {"outs": [{"path": "data/prompts/train.parquet", "md5": "91c0ffee"}]},
    "profile": {
        "deps": [
            {"path": "data/prompts/train.parquet", "md5": "3f2abcde"},
            {"path": "data/code/profile.json", "md5": "0123abcd"},
        ],
        "params": {"params.yaml": {"profile": {"num_samples": 8, "old": [1]}}},
        "outs": [],
    },
}
BEFORE = {
    "files": {"tasks/a.py": "1", "tasks/b.py": "1", "tasks/same.py": "1"},
    "versions": {"torch": "2.13.0"},
}
NOW = {
    "files": {"tasks/a.py": "2", "tasks/c.py": "1", "tasks/same.py": "1"},
    "versions": {"torch": "2.14.0", "vllm": "0.32.0"},
}
DVC: Any = None
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
        ({"changed deps": {"tasks": "modified"}}, ["tasks changed"]),
        (
            {"changed deps": {"data/code/profile.json": "modified"}},
            [
                "code tasks/a.py changed",
                "code tasks/b.py is no longer used",
                "code tasks/c.py is new here",
                "torch 2.13.0 -> 2.14.0",
                "vllm (none) -> 0.32.0",
            ],
        ),
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
            {"changed deps": {"data/code/profile.params.yaml": "new"}},
            ["data/code/profile.params.yaml is new here"],
        ),
        (
            {"changed outs": {"data/x": "deleted", "data/y": "not in cache"}},
            ["output missing: data/x and 1 more"],
        ),
        ({"changed outs": {"data/x": "modified"}}, ["output changed since: data/x"]),
        ("changed command", ["command changed"]),
    ],
)
def test_reasons_name_the_differences(change: object, phrases: list[str], tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("profile: {num_samples: 9}")
    write_json(tmp_path / "data/code/profile.json", NOW)
    write_json(tmp_path / ".dvc/cache/files/md5/01/23abcd", BEFORE)
    assert reasons.explain("profile", [change], LOCK, tmp_path) == phrases
    assert reasons.explain("train@sgpo-0", [change], LOCK, tmp_path) == ["never run"]


def test_earlier_code_missing_in_the_cache(tmp_path: Path) -> None:
    write_json(tmp_path / "data/code/profile.json", NOW)
    change = {"changed deps": {"data/code/profile.json": "modified"}}
    assert reasons.explain("profile", [change], LOCK, tmp_path) == [
        "code changed (data/code/profile.json; the previous one is not in DVC's cache)"
    ]


def test_many_files_are_counted(tmp_path: Path) -> None:
    before, now = ({**NOW, "files": {f"{n}.py": digest for n in range(9)}} for digest in "12")
    write_json(tmp_path / ".dvc/cache/files/md5/01/23abcd", before)
    phrases = reasons.explain_digests("new.json", "0123abcd", now, tmp_path)
    assert phrases == [*(f"code {n}.py changed" for n in range(5)), "and 4 more files"]


def test_long_values_are_truncated() -> None:
    assert changes.show(list(range(100))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13..."


def test_everything_is_selected_by_default_in_order() -> None:
    ordered, excluded = selection.select(NEEDS, [], None, None)
    assert excluded == []
    assert [ordered[0], ordered[-1]] == ["ingest", "report"]
    place = ordered.index
    assert all(place(need) < place(stage) for stage in NEEDS for need in NEEDS[stage])


def test_cells_run_one_after_the_other() -> None:
    """So the first results come early."""
    chains: dict[str, set[str]] = {
        f"{stage}@{cell}": set() for stage in ("allocate", "train") for cell in ("a-0", "b-0")
    }
    needs = {name: {name.replace("train", "allocate")} - {name} for name in chains}
    needs |= {"profile": set(), "allocate@a-0": {"profile"}, "report": {*chains}}
    cells = ["allocate@a-0", "train@a-0", "allocate@b-0", "train@b-0"]
    assert selection.order(needs) == ["profile", *cells, "report"]


def no_memory(*_: Any, **__: Any) -> None:
    raise OSError("no memory")


@pytest.mark.parametrize(
    ("outcomes", "changed", "cells"),
    [
        ({"evaluate@a-0": "Ran"}, [*"abc"], "a/0"),
        ({"evaluate@a-0": "Ran", "evaluate@b-0": "Failed"}, [*"abc"], "a/0"),
        ({"evaluate@b-0": "Restored"}, [*"bc"], "a/0 b/0"),  # a-0 is up to date
        ({"evaluate@a-0": "Ran", "baseline": "Failed"}, [*"abc"], ""),
        ({f"evaluate@{name}-0": "Ran" for name in "abc"}, [*"abc"], ""),  # the report follows
    ],
)
def test_the_page_is_written_of_the_cells_that_have_ended(
    outcomes: dict[str, str],
    changed: list[str],
    cells: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not again before it is due; and a failure is a warning."""
    calls: list[list[str]] = []

    def called(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return SimpleNamespace(returncode=1, stderr=b"no room")

    monkeypatch.setattr("flows.pipeline.stages.subprocess.run", called)
    needs = {f"train@{name}-0": {"profile"} for name in "abc"}
    needs |= {f"evaluate@{name}-0": {f"train@{name}-0"} for name in "abc"}
    needs |= {"profile": set(), "baseline": set()}
    changes = {f"train@{name}-0": ["changed deps"] for name in changed}
    ended: Any = {"profile": "Ran", **outcomes}
    found = stages.Stages(DVC, Root(), needs, [*needs], [], changes, set(), ended)
    found.write_page()
    assert [" ".join(command).partition("--cells ")[2] for command in calls] == [cells] * bool(
        cells
    )
    assert ("page was not written: no room" in caplog.text) == bool(cells)
    found.page_due = float("inf")
    found.write_page()
    assert len(calls) == bool(cells)
    found.page_due = 0.0
    monkeypatch.setattr("flows.pipeline.stages.subprocess.run", no_memory)
    found.write_page()
    assert ("page was not written: no memory" in caplog.text) == bool(cells)


@pytest.mark.parametrize(
    ("outcome", "words"), [("Ran", "no sample of the profile"), ("Failed", "")]
)
def test_a_profile_without_a_success_is_in_the_conclusion(
    outcome: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the profile is of an earlier run."""
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    counts = {"correct": 0, "wrong": 29, "truncated": 99}
    write_checked(tmp_path / "data/profile/summary.json", {"outcomes": counts})
    found = stages.Stages(DVC, Root(), {}, ["profile"], [], {"profile": []}, set())
    found.outcomes["profile"] = outcome
    first, *more = summary.conclusion(found).splitlines()
    assert first == f"1 stages: 1 {outcome.lower()}"
    assert [words in line and "99 truncated, 29 wrong" in line for line in more] == [True] * bool(
        words
    )


@pytest.mark.parametrize("changed", ["evaluate@a-0", "ingest"])  # a-0 itself, or before it
def test_recipe_and_seed_select_a_cell_and_its_upstream_stages(changed: str) -> None:
    ordered, excluded = selection.select(NEEDS, [changed], ["b-c"], [1])
    assert ordered == ["ingest", "allocate@b-c", "evaluate@b-c-1"]
    assert "report" in excluded


@pytest.mark.parametrize(
    ("recipes", "until", "kept"),
    [
        (None, ["evaluate@a-1"], ["ingest", "allocate@a", "evaluate@a-1"]),
        (["b-c"], ["allocate", "baseline"], ["ingest", "baseline", "allocate@b-c"]),
    ],
)
def test_until_keeps_stages_and_what_they_need(
    recipes: list[str] | None, until: list[str], kept: list[str]
) -> None:
    ordered, excluded = selection.select(NEEDS, ["ingest"], recipes, None, [], until)
    assert ordered == kept
    assert {*excluded} == {*NEEDS} - {*kept}
    with pytest.raises(selection.SelectionError, match="stage trian is not in the experiment"):
        selection.select(NEEDS, [], recipes, None, [], ["trian"])


def test_unknown_recipe_is_refused() -> None:
    message = "recipe dapo is not in the experiment: it has a, b-c"
    with pytest.raises(selection.SelectionError, match=message):
        selection.select(NEEDS, [], ["dapo"], None)


def test_forced_stage_outside_the_selection_is_refused() -> None:
    for forced, recipes in (("evaluate@a-1", ["b-c"]), ("allocate@b-c", ["a"])):
        with pytest.raises(selection.SelectionError, match=f"--force {forced}: .* leaves it out"):
            selection.select(NEEDS, [], recipes, None, [forced])
    selection.select(NEEDS, [], ["b-c"], None, ["ingest", "report", "evaluate@b-c-1"])


def test_report_is_selected_if_the_other_cells_are_up_to_date() -> None:
    ordered, excluded = selection.select(NEEDS, ["evaluate@b-c-1", "report"], ["b-c"], None)
    cells = ["evaluate@b-c-0", "evaluate@b-c-1"]
    assert ordered == ["ingest", "baseline", "allocate@b-c", *cells, "report"]
    assert excluded == ["allocate@a", "evaluate@a-0", "evaluate@a-1"]


def test_every_command_replaces_its_shell() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    modules = {**{name: name for name in stages}, "baseline": "evaluate"}
    for name, stage in stages.items():
        assert stage["cmd"].startswith(f"exec python -m tasks.{modules[name]} ")
        assert "$" not in stage["cmd"]  # a shell would expand a value


@pytest.mark.parametrize(
    ("environment", "profiles", "url"),
    [
        ({"PREFECT_API_URL": "http://there/api"}, "", "http://there/api"),
        ({}, 'active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://a/api"\n', "http://a/api"),
        ({}, 'active = "b"\n[profiles.b]\n', None),
        ({}, None, None),
        ({}, "not toml", None),
    ],
)
def test_named_server_is_found_without_prefect(
    environment: dict[str, str],
    profiles: str | None,
    url: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "PREFECT_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    if profiles is not None:
        (tmp_path / "profiles.toml").write_text(profiles)
    assert server.named_url() == url


@pytest.mark.parametrize(
    "first", ["", "from flows import logs; import flows.cli.run; logs.log_to_terminal(); "]
)
def test_warnings_are_shown_once_with_or_without_prefect(first: str) -> None:
    program = f"{first}import flows.pipeline.flow, logging; " + "; ".join(
        f"logging.getLogger({name!r}).warning('from {name}')"
        for name in ("tasks.common.processes.locks", "dvc.repo", "prefect.engine")
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines() == ["from tasks.common.processes.locks", "from dvc.repo"]


def test_run_without_work_imports_no_slow_library() -> None:
    """Such a run takes less time than the import of one of them."""
    program = "import flows.cli.run, sys; print(*{n.partition('.')[0] for n in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    slow = {"prefect", "polars", "pyarrow", "mlflow", "torch", "dvc", "botocore", "psutil"}
    assert not slow & set(done.stdout.split())


def test_edges_of_the_pipeline() -> None:
    with commands.Dvc() as dvc:
        needs = dvc.graph()
    assert needs["code"] == set()
    assert needs["policy"] == {"code"}
    assert needs["profile"] == {"code", "ingest", "policy"}
    assert needs["train@sgpo-0"] == {"code", "ingest", "policy", "allocate@sgpo-0"}
    assert needs["evaluate@sgpo-0"] == {"code", "ingest", "policy", "train@sgpo-0"}
    read = {"baseline", "profile", "allocate@grpo-0", "train@grpo-0", "evaluate@sgpo-0"}
    assert read <= needs["report"]


def test_full_cache_is_not_a_failure_of_the_command() -> None:
    full = "ERROR: failed to reproduce 'train@sgpo-0': [Errno 28] No space left on device"
    message = stages.failure("train@sgpo-0", 255, True, ["this is train, live", full])
    assert message.startswith("its command succeeded, but dvc could not store its outputs")
    own = "12:00:00 train: data/x: [Errno 28] No space left on device"
    assert stages.failure("train", 1, True, [own]).startswith("its command failed")


def test_record_of_another_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    write_json(tmp_path / "other/params.yaml", {"tracking": {"uri": "sqlite:///x.db"}})
    assert "mlflow ui --backend-store-uri sqlite:///x.db" in summary.places(Root("other"))
    assert not summary.places(Root("other"), is_stale=True).startswith("stale")  # nothing is shown
    (tmp_path / "other/report").mkdir()
    (tmp_path / "other/report/leaderboard.txt").write_text("sgpo 40.4%\n")
    assert summary.places(Root("other")).startswith("sgpo 40.4%\n")
    stale = summary.places(Root("other"), is_stale=True).splitlines()[0]
    assert stale == "stale: this leaderboard is of an earlier run; a new one needs all cells"


def test_failure_names_the_command_for_its_data_root() -> None:
    message = stages.failure("other/dvc.yaml:train@a-0", 1, True, [])
    assert "To resume: `winnow run --data other`;" in message


def test_folders_written_outside_the_data_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert health.written_beside() == [tmp_path / ".dvc/tmp", tmp_path / ".dvc/cache"]
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config.local").write_text("[cache]\n    dir = ../shared%20cache\n")
    assert health.written_beside()[1] == tmp_path / ".dvc/../shared%20cache"
    (tmp_path / ".dvc/config").write_text("<<<<<<< HEAD\n[core]\n")
    with pytest.raises(ArtifactError, match=r"configuration cannot be read: .*\.dvc/config"):
        health.written_beside()
    (tmp_path / ".dvc/config").unlink()
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    assert health.written_beside()[2] == tmp_path / "prefect"
