"""Rounds and data roots: refused requests, and a second round on the scratch project."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows.__main__ import parser_of
from flows.cli import flags
from flows.pipeline import commands, flow, lock, roots, rounds
from flows.pipeline.overrides import applied
from flows.pipeline.roots import Root, root_of
from flows.pipeline.rounds import FlowRequest
from flows.pipeline.selection import SelectionError
from flows.pipeline.stages import StageFailed, Stages, forced_of
from tasks.common import params
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tests.flows.project import ROOT, Project, lines, shell
from tests.flows.test_pipeline import flow_run
from tests.patience import PATIENCE

SECOND = "data/rounds/2"
SGPO = "data/runs/sgpo/0/train/policy"


def request(**options: Any) -> FlowRequest:
    return FlowRequest(**options)


def titled(output: str, word: str) -> list[str]:
    """Return the stages of the second round whose line contains `word`."""
    return re.findall(rf"^\[\d+/\d+\] round 2: (\S+): {word}", output, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"starts": ("sgpo/0",)}, "with --rounds 1 there are 0 of these, but it is given 1 times"),
        ({"rounds": 2, "starts": ("sgpo/0", "sgpo/0")}, "there are 1 of these"),
        ({"data": SECOND, "rounds": 3}, "use the first, --data data --rounds 3"),
        (
            {"data": SECOND, "force": ["ingest"]},
            "`winnow run --data data --rounds 2 --force ingest`",
        ),
        ({"data": "../other"}, "a data root is a folder at the top of the project"),
        ({"data": "data/other"}, "a data root is a folder at the top of the project"),
    ],
)
def test_contradictory_request_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(words)):
        request(**options).check()


def test_start_outside_the_experiment_is_refused() -> None:
    values = params.load(ROOT / "params.yaml")
    rounds.check_starts(values, ["champion", "sgpo/0"])
    with pytest.raises(SelectionError, match=r"--from pods/0 .* it has grpo/0, .*, or champion"):
        rounds.check_starts(values, ["pods/0"])


def test_cells_behind_a_changed_stage_are_refused_if_left_out() -> None:
    """They are the start of a round, and cells of a report after `--force ingest`."""
    needs = {"allocate@a-0": set(), "train@a-0": {"allocate@a-0"}, "report": {"train@a-0"}}
    dvc: Any = SimpleNamespace(status=lambda _: {"allocate@a-0": ["changed deps"]})
    stages = Stages(dvc, Root(), needs, ["report"], ["allocate@a-0", "train@a-0"], {}, {"report"})
    with pytest.raises(SelectionError, match=r"train@a-0 is out of date and left out of this run"):
        rounds.policy_of(stages, "a/0")
    with pytest.raises(StageFailed, match="out of date and left out: allocate@a-0; run all"):
        stages.bring_up_to_date("report", dvc)


def test_file_is_no_data_root() -> None:
    with pytest.raises(ParamsError, match="LICENSE is a file: use a new folder with --data"):
        roots.prepare_first(Root("LICENSE"))


def test_command_line_is_a_request() -> None:
    words = ["run", "grpo", "--seed", "0", "1", "--rounds", "3", "--from", "sgpo/0"]
    words += ["--data", "other", "--set", "a.b=1", "~c"]
    parsed = flags.request_of(parser_of("run").parse_args(words))
    assert parsed == FlowRequest(["grpo"], [0, 1], [], ["a.b=1", "~c"], "other", 3, ["sgpo/0"])
    flow.pipeline.validate_parameters(vars(parsed))
    assert [root.folder for root in parsed.chain] == ["other", "other/rounds/2", "other/rounds/3"]


def test_forced_stages_are_forced_in_every_round_that_has_them() -> None:
    needs: dict[str, set[str]] = {"profile": set(), "report": {"profile"}}
    assert forced_of(Root("data", 2), needs, ["ingest", "profile"]) == {"profile"}
    for root, stage in ((Root(), "ingest"), (Root("data", 2), "profil")):
        with pytest.raises(SelectionError, match=f"stage {stage} is not in the experiment"):
            forced_of(root, needs, [stage, "profile"])


def test_stages_have_their_own_names_in_every_root() -> None:
    second = root_of(f"./{SECOND}/")
    assert second == Root("data", 2)
    assert second.titled("profile") == "round 2: profile"
    addresses = ["profile", f"{SECOND}/dvc.yaml:profile", "data/rounds/22/dvc.yaml:profile"]
    assert second.own(addresses) == {second.address("profile"): "profile"}
    assert Root().own(addresses) == {"profile": "profile"}


@pytest.mark.slow
def test_second_round_starts_from_the_champion_and_runs_once(project: Project) -> None:
    path = project.root / "params.yaml"
    before = path.read_text()
    killed = applied(path, Layout(project.root / "data"), ["allocate.passes=5"])
    killed.__enter__()
    output = project.flow("sgpo", "--experiment", "--rounds", "2")  # few stages
    killed.gen.close()  # type: ignore[attr-defined]
    # the file is as before the killed run
    assert path.read_text() == before.replace("recipes: [grpo, sgpo, winnow]", "recipes: [sgpo]")
    assert lines(output, "starts") == ["report"]  # of fewer recipes
    cell = ["allocate@sgpo-0", "train@sgpo-0", "evaluate@sgpo-0"]
    assert titled(output, "ran") == ["code", "policy", "profile", "baseline", *cell, "report"]
    second = lock.read(project.root / SECOND / "dvc.lock")
    champion = digest_of(lock.read(project.root / "dvc.lock")["train@sgpo-0"], "outs", SGPO)
    assert digest_of(second["policy"], "deps", SGPO) == champion
    values = yaml.safe_load((project.root / SECOND / "params.yaml").read_text())
    assert values["policy"]["source"] == SGPO
    assert (project.root / SECOND / "prompts" / "train.parquet").exists()
    assert visible(project) == {
        f"{SECOND}/{name}"
        for name in (".gitignore", "dvc.lock", "dvc.yaml", "params.yaml", "prompts")
    }
    output = project.without_server().flow("--rounds", "2")
    assert "nothing to do: all 17 stages of 2 rounds are up to date" in output
    assert f"{SECOND}/report/index.html" in output
    assert project.status() == {}


@pytest.mark.slow
def test_overrides_apply_to_both_rounds_and_are_undone(project: Project) -> None:
    project.edit("params.yaml", "recipes: \\[grpo, sgpo, winnow", "recipes: [grpo")
    project.behave(**{f"{SECOND}/dvc.yaml:policy": "fail"})
    options = ("--rounds", "2", "--set", "evaluate.num_samples=9", "--from", "grpo/0")
    output = project.flow(*options, expect=1)
    assert "baseline" in lines(output, "ran")
    assert titled(output, "FAILED") == ["policy"]
    assert f"`winnow run --data {SECOND} --until policy`" in output
    assert flow_run(project)["parameters"]["overrides"] == ["evaluate.num_samples=9"]
    ran_with = yaml.safe_load((project.root / SECOND / "code/baseline.params.yaml").read_text())
    assert ran_with["evaluate"]["num_samples"] == 9
    values = yaml.safe_load((project.root / SECOND / "params.yaml").read_text())
    assert values["policy"]["source"] == "data/runs/grpo/0/train/policy"
    assert values["evaluate"]["num_samples"] == 4


def test_new_data_root_gets_its_own_parameters(project: Project) -> None:
    project.behave(**{"other/dvc.yaml:ingest": "fail"})
    output = project.flow("grpo", "--data", "other", expect=1)
    assert "other: policy: ran" in output
    assert "other: train@grpo-0: not run" in output
    assert (project.root / "other/params.yaml").read_text() == (
        project.root / "params.yaml"
    ).read_text()
    assert project.status().keys() >= {"other/dvc.yaml:ingest"}
    assert not any(":" not in stage for stage in project.status())  # no stage of the first root
    assert "flows contains other files" in project.flow("--data", "flows", expect=1)


def test_plan_of_a_round_that_never_ran(project: Project) -> None:
    printed = project.winnow("plan", "--rounds", "2")
    assert "data, from tiny:\nnothing to do: all 15 stages are up to date" in printed
    assert f"{SECOND}: never run" in printed


def test_plan_changes_a_round_only_while_no_flow_runs(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ROOT", project.root)
    roots.prepare_round(Root("data", 2), "tiny")
    project.edit("params.yaml", r"^  source: tiny.*\n", "")  # the default
    with rounds.locked():
        child = project.start("flows", "plan", "--rounds", "2", "--force", "ingest")
        assert child.stdout is not None
        printed = next(child.stdout)
        while "waiting for the pipeline: process" not in printed:
            printed += next(child.stdout)
    printed += child.communicate(timeout=PATIENCE)[0]
    assert "data, from tiny:\n" in printed
    assert "requested by --force" in printed
    assert f"{SECOND}, from tiny:" in printed


def digest_of(entry: dict[str, Any], kind: str, path: str) -> str:
    return next(str(one["md5"]) for one in entry[kind] if one["path"] == path)


def visible(project: Project) -> set[str]:
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    return set(shell(project.root, project.environment, *command).split())
