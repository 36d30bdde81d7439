"""Overrides for one run are in the file during the run, and undone at its end."""

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from flows.__main__ import parser_of
from flows.doctor import health
from flows.pipeline import commands, flow
from flows.pipeline.overrides import applied, check_remote
from flows.pipeline.request import FlowRequest, opened
from flows.serve import schedule
from tasks.common import params
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tests.flows.project import Project

TEXT = """\
# all values
train:
  learning_rate: 3.0e-4   # of Adam
experiment:
  recipes: [grpo]
  seeds: [0]
ingest: {sources: [{preset: gsm8k, settings: {path: a.jsonl}}]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text(TEXT)
    return tmp_path / "params.yaml"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "data")


def test_overrides_are_in_the_file_during_the_run_only(
    path: Path, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ["sampling.max_tokens=8", "train.weight_decay=1e-2"]
    overrides = ["train.learning_rate=1e-4", "experiment.seeds=[0,1]", *missing]
    path.write_bytes(before := TEXT.replace("\n", "\r\n").encode())
    with applied(path, layout, overrides):
        during, values = path.read_text(), params.load(path)
    assert (values["sampling"], values["train"]["weight_decay"]) == ({"max_tokens": 8}, 0.01)
    assert "learning_rate: 0.0001   # of Adam" in during
    assert "# all values" in during
    assert "seeds: [0, 1]" in during or "- 1" in during
    assert path.read_bytes() == before
    assert f"the outputs in {os.path.relpath(layout.root)} were made with train" in caplog.text
    assert sorted(file.name for file in path.parent.iterdir()) == ["data", "params.yaml"]


def test_damaged_note_stops_the_run(path: Path, layout: Layout) -> None:
    killed = applied(path, layout, ["train.learning_rate=1"])
    killed.__enter__()
    note = layout.locks / "overrides.json"
    content = note.read_text()
    note.write_text(content.replace("all values", "all valves"))
    with (
        pytest.raises(ParamsError, match=r"restore it, and delete .*overrides.json"),
        applied(path, layout, []),
    ):
        raise AssertionError("it must not run")
    note.write_text(content)
    killed.gen.close()  # type: ignore[attr-defined]
    assert path.read_text() == TEXT  # as after an interrupt


def test_next_run_undoes_the_overrides_of_a_killed_run(
    path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ROOT", path.parent)
    monkeypatch.setattr(commands, "Dvc", lambda **_: nullcontext())
    monkeypatch.setattr(health, "examine", lambda *_: None)
    (path.parent / "dvc.yaml").write_text("stages: {}")
    killed = applied(path, layout, ["train.learning_rate=1"])
    killed.__enter__()
    with opened(FlowRequest(data="other")):
        assert (path.parent / "other/params.yaml").read_text() == path.read_text() == TEXT
    killed.gen.close()  # type: ignore[attr-defined]


def test_edits_during_the_run_stay(
    path: Path, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    with applied(path, layout, ["train.learning_rate=1"]):
        path.write_text(TEXT + "more: 1\n")
    assert path.read_text() == TEXT + "more: 1\n"
    assert "was changed during a run with overrides" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learnign_rate=1", "train.learnign_rate is unknown; .* did you mean learning_rate"),
        ("train.learning_rate", "An override is KEY=VALUE"),
        ("sampling.max_tokens=some", "sampling.max_tokens is 'some', which is not a whole number"),
        ("nothing.key=3", "section .nothing. is unknown"),
    ],
)
def test_invalid_override_is_refused(
    override: str, message: str, path: Path, layout: Layout
) -> None:
    with pytest.raises(ParamsError, match=message):
        applied(path, layout, [override]).__enter__()
    assert path.read_text() == TEXT
    assert [file.name for file in path.parent.iterdir()] == ["params.yaml"]


HARMLESS = [
    "train.learning_rate=1e-4",
    "allocate.passes=5",
    "profile.num_samples=-1",
    "experiment.budget.amount=6.0e11",
    "recipes.my-own.allocate.unsolved_rate=.25",
    "experiment.seeds=[0,1, 12]",
    "experiment.recipes=[grpo, sgpo_0]",
]
HARMFUL = [
    "policy.source=/tmp/policy",
    "policy.trust_remote_code=1",
    "engine.urls=[http://there]",
    "verify.seconds=1e9",
    "train.loss.method=clip",
    "train.loss={method: clip}",
    "train.learning_rate=${oc.env:HOME}",
    "train.learning_rate=1\npolicy.source=/tmp/policy",
    "experiment.recipes=[$(id)]",
    "experiment.seeds=[$(id)]",
    "+policy.source=/tmp/policy",
    "train.learning_rate@policy.source=1",
]


@pytest.mark.parametrize("override", HARMLESS)
def test_numbers_recipes_and_seeds_are_accepted_through_the_api(override: str) -> None:
    check_remote([override])
    assert parser_of("serve").parse_args(["serve", "--set", override]).overrides == [override]


@pytest.mark.parametrize("override", HARMFUL)
def test_other_overrides_are_refused_through_the_api(override: str) -> None:
    message = f"^{re.escape(override.partition('=')[0])} cannot be set through Prefect's API"
    with pytest.raises(ParamsError, match=message):
        flow.stages_of_api_request(FlowRequest([], [], [], ["train.learning_rate=1e-4", override]))
    with pytest.raises(ParamsError, match=message):
        schedule.run(parser_of("serve").parse_args(["serve", "--set", override]))


def test_password_in_an_override_is_refused_and_written_nowhere(project: Project) -> None:
    secret = "hid/den"
    output = project.flow("--set", f"store.location=s3://KEY:{secret}@bucket/x", expect=1)
    assert "store.location contains credentials" in output
    assert secret not in output
    places = [project.root, Path(project.environment["PREFECT_HOME"])]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
