"""The record, in a real sqlite database: runs, curves, parameters, datasets and policies."""

import shutil
import time
from pathlib import Path

import pytest

from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.checksums import write_checked
from tasks.common.files import digest_file
from tasks.common.tracking import Tracking, pipelines, system, track
from tasks.policy.source import EMBEDDED
from tests.common.record import LOCAL, away, pending_files, runs_of
from tests.files import commit_all
from tests.stages import give_record

ROOT = Path(__file__).resolve().parents[2]


def test_stages_without_a_flow_share_a_parent_run(layout: Layout) -> None:
    with track(LOCAL, layout, "profile", None, None):
        pass
    with track(LOCAL, layout, "train", "sgpo", 0):
        pass
    runs = runs_of(layout)
    (parent,) = [run for run in runs.values() if run.data.tags["kind"] == "pipeline"]
    cell = runs["sgpo/0"]
    assert len(runs) == 4
    above = {name: run.data.tags.get("mlflow.parentRunId") for name, run in runs.items()}
    assert above.pop(parent.info.run_name) is None
    assert above == {
        "profile": parent.info.run_id,
        "sgpo/0": parent.info.run_id,
        "train sgpo/0": cell.info.run_id,
    }
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    tags = runs["train sgpo/0"].data.tags
    assert tags["kind"] == "stage"
    assert (tags["stage"], tags["recipe"], tags["seed"]) == ("train", "sgpo", "0")
    assert len(tags["mlflow.source.git.commit"]) == 40


def test_database_and_artifacts_are_under_the_data_root(bare: Layout) -> None:
    kept = bare.root / "note.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("seen")
    with track(LOCAL, bare, "report", None, None) as tracker:
        tracker.artifact(kept)
    modes = [path.stat().st_mode & 0o777 for path in (bare.tracking, bare.tracking / "mlflow.db")]
    assert modes == [0o700, 0o600]
    assert [path.read_text() for path in (bare.tracking / "artifacts").rglob("note.txt")] == [
        "seen"
    ]


def test_a_copied_project_writes_into_its_own_folder(
    bare: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the names have a space and a percent sign; a symbolic link is the same project."""
    first, link = Layout(tmp_path / "P 1%" / "data"), Layout(tmp_path / "link" / "data")
    give_record(first.root)
    trained(first, "grpo", 0.5, weights=True)
    link.root.parent.symlink_to(first.root.parent)
    copy = Layout(Path(shutil.copytree(first.root.parent, tmp_path / "Q")) / "data")
    before = sorted((first.tracking / "artifacts").rglob("*"))
    for where, warned in ((link, 0), (copy, 1), (copy, 1)):
        with track(LOCAL, where, "report", None, None) as tracker:
            tracker.champion(where.trained_card("grpo", 0), "it was better")
            if where is copy:
                tracker.artifact(copy.train("grpo", 0) / "curve.parquet")
        assert caplog.text.count("was copied or moved from") == warned
    assert sorted((first.tracking / "artifacts").rglob("*")) == before
    assert len(list(copy.tracking.rglob("curve.parquet"))) == 2
    client = tracking.connect(tracking.address(LOCAL, copy))
    version = client.get_model_version_by_alias("winnow", "champion")
    run = client.get_run(version.run_id)
    (model,) = client.search_logged_models([run.info.experiment_id])
    own = copy.tracking / "artifacts"
    places = (version.source, run.info.artifact_uri, model.artifact_location)
    assert all(place.startswith(own.as_uri()) for place in places)
    assert version.tags["path"] == str(copy.train("grpo", 0) / "policy")


def test_long_curves_are_thinned_and_keep_both_ends(layout: Layout) -> None:
    """The curve has more points than one call to MLflow may contain."""
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        for step in range(5000):
            rare = {"accuracy": step / 5000} if step % 1000 == 999 else {}
            values = {"loss": step / 5000, "missing": None, **rare}
            tracker.metrics(values, step=step, flops=step * 1e18)
    run = runs_of(layout)["train grpo/0"]
    client = tracking.connect(tracking.address(LOCAL, layout))
    assert "missing" not in run.data.metrics
    expected = [*range(1000), *range(1000, 2000, 2), *range(2000, 4000, 4), *range(4000, 5000, 8)]
    for name, unit in (("loss", 1), ("by_gflops/loss", 10**9)):
        history = client.get_metric_history(run.info.run_id, name)
        assert [point.step for point in history] == [step * unit for step in (*expected, 4999)]
        assert all(point.value == point.step / unit / 5000 for point in history)
    rare_points = client.get_metric_history(run.info.run_id, "accuracy")
    assert [point.step for point in rare_points] == [999, 1999, 2999, 3999, 4999]


@pytest.mark.parametrize("is_away", [False, True])
def test_curves_of_a_resumed_cell_have_each_point_once(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """They are over the budget's account, and begin at the profile's cost of 30 GFLOPs."""
    plan = layout.plan("sgpo", 0)
    write_checked(plan / "budget.json", {"budget": {"account": "executed"}})
    write_checked(plan / "forecast.json", {"reads_profile": True})
    write_checked(layout.profile / "flops.json", {"executed": {"profile": 30e9}})

    def train(first: int, end: int, rate: float = 0.1) -> None:
        """The checkpoint of step 2 was written after its validation, which is not repeated."""
        monkeypatch.setenv(tracking.PIPELINE_VARIABLE, tracking.start_pipeline())
        with track(LOCAL, layout, "train", "sgpo", 0) as tracker:
            tracker.params({"rate": rate})
            for step in range(first, end):
                if step in (0, 4) or (step == 2 and first == 0):
                    tracker.metrics({"validation_accuracy": step / 8}, step, step * 9e9)
                values = {"reward_mean": step / 4, "loss": 1.0, "flops_executed": (step + 1) * 2e9}
                tracker.metrics(values, step, (step + 1) * 9e9)
                tracker.flush()

    train(0, 4)
    with monkeypatch.context() as broken:
        if is_away:
            broken.setattr(tracking, "open_run", away)
        train(2, 5)
        train(0, 1, rate=0.2)
    for path in pending_files(layout):
        tracking.replay(path, tracking.address(LOCAL, layout))
    client = tracking.connect(tracking.address(LOCAL, layout))
    experiment = client.get_experiment_by_name("winnow").experiment_id
    cells = client.search_runs([experiment], "tags.kind = 'cell'", order_by=["start_time ASC"])
    resumed = {
        "validation_accuracy": [(0, 0.0), (2, 0.25), (4, 0.5)],
        "by_gflops/validation_accuracy": [(30, 0.0), (34, 0.25), (38, 0.5)],
        "reward_mean": [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)],
        "by_gflops/reward_mean": [(32, 0.0), (34, 0.25), (36, 0.5), (38, 0.75), (40, 1.0)],
    }
    assert [{*cell.data.metrics} for cell in cells] == [{*resumed}] * 3
    for name, expected in resumed.items():
        curves = [client.get_metric_history(cell.info.run_id, name) for cell in cells]
        assert [(point.step, point.value) for point in curves[1]] == expected
        assert len(curves[2]) == 1


def test_parameters_are_flattened_and_long_values_truncated(layout: Layout) -> None:
    values = {
        "loss": {"clip": {"low": 0.2}},
        "buckets": [2, 4],
        "text": "x" * 7000,
        "empty": {},
        "switch": {"on": True, "limit": None},
        **{f"key{index}": index for index in range(250)},
    }
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        tracker.params(values)
    params = runs_of(layout)["train grpo/0"].data.params
    assert params["loss.clip.low"] == "0.2"
    assert params["buckets"] == "[2, 4]"
    assert params["empty"] == "{}"
    assert (params["switch.on"], params["switch.limit"]) == ("true", "null")
    assert params["text"].endswith("... (cut, 7000 characters)")
    assert len(params["text"]) == 6000
    assert params["key249"] == "249"


def test_input_is_linked_to_the_run_that_wrote_it(layout: Layout) -> None:
    profile = layout.profile / "profile.parquet"
    with track(LOCAL, layout, "profile", None, None):
        profile.parent.mkdir(parents=True)
        profile.write_bytes(b"one")
    made_by = runs_of(layout)["profile"].info.run_id
    with track(LOCAL, layout, "allocate", "sgpo", None) as tracker:
        tracker.dataset("profile", profile, digest_file(profile), "allocation")
        tracker.dataset("elsewhere", Path("/elsewhere/prompts.parquet"), "0" * 16, "training")
    run = runs_of(layout)["allocate sgpo"]
    assert run.data.tags["digest.input.profile/profile.parquet"] == digest_file(profile)
    assert run.data.tags["run.input.profile/profile.parquet"] == made_by
    assert "run.input./elsewhere/prompts.parquet" not in run.data.tags
    datasets = {entry.dataset.name: entry for entry in run.inputs.dataset_inputs}
    assert datasets["profile"].dataset.digest == digest_file(profile)
    assert [tag.value for tag in datasets["profile"].tags] == ["allocation"]


def trained(layout: Layout, recipe: str, accuracy: float, weights: bool = False) -> Path:
    """Record a training with a curve and a policy, and return the policy's card."""
    folder = layout.train(recipe, 0)
    with track(
        Tracking(None, "winnow", 1.0 if weights else 0.0, []), layout, "train", recipe, 0
    ) as tracker:
        (folder / "policy").mkdir(parents=True)
        (folder / "policy" / "model.safetensors").write_text(recipe)
        (folder / "policy" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
        (folder / "curve.parquet").write_text(f"{accuracy}")
        digest = digest_file(folder / "policy" / "model.safetensors")
        write_checked(layout.trained_card(recipe, 0), {"digest": digest})
        tracker.model(f"{recipe}/0", folder / "policy", digest)
    return layout.trained_card(recipe, 0)


def test_champion_is_an_alias_and_weights_are_uploaded_only_on_demand(layout: Layout) -> None:
    curve = trained(layout, "grpo", 0.5)
    assert not list((layout.tracking).rglob("model.safetensors"))
    better = trained(layout, "sgpo", 0.6, weights=True)
    assert len(list((layout.tracking).rglob("model.safetensors"))) == 1
    client = tracking.connect(tracking.address(LOCAL, layout))
    for evidence, recipe in ((curve, "grpo"), (better, "sgpo"), (better, "sgpo"), (curve, "grpo")):
        with track(LOCAL, layout, "report", None, None) as tracker:
            tracker.champion(evidence, "it was better")
        version = client.get_model_version_by_alias("winnow", "champion")
        assert version.tags["digest"] == digest_file(
            layout.train(recipe, 0) / "policy" / "model.safetensors"
        )
    assert len(client.search_model_versions("name = 'winnow'")) == 2
    with track(LOCAL, layout, "report", None, None) as tracker:
        tracker.champion(None, "none beat the initial policy")
    assert client.get_registered_model("winnow").aliases == {}


def test_model_has_a_name_that_mlflow_allows(layout: Layout) -> None:
    with track(Tracking(None, "team/bob's", 0.0, []), layout, "report", None, None) as tracker:
        tracker.champion(None, "none beat the initial policy")
    client = tracking.connect(tracking.address(LOCAL, layout))
    assert [model.name for model in client.search_registered_models()] == ["team-bob-s"]


def test_failed_upload_of_a_policy_keeps_the_rest_of_the_record(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    folder = layout.train("grpo", 0) / "policy"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights without a config")
    with track(Tracking(None, "winnow", 1.0, []), layout, "train", "grpo", 0) as tracker:
        tracker.model("grpo/0", folder, "abc")
        tracker.metrics({"loss": 0.5})
    assert "the weights of grpo/0 are not uploaded" in caplog.text
    assert runs_of(layout)["train grpo/0"].data.metrics["loss"] == 0.5
    assert not (layout.tracking / "pending").exists()


@pytest.mark.slow
def test_mlflow_loads_champion_and_candidate_by_their_aliases(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow uses only the uploaded files."""
    import mlflow.transformers  # slow

    folder = layout.train("sgpo", 0)
    folder.mkdir(parents=True)
    shutil.copytree(EMBEDDED.policy, folder / "policy")
    (folder / "curve.parquet").write_text("0.6")
    with track(Tracking(None, "winnow", 1.0, []), layout, "train", "sgpo", 0) as tracker:
        tracker.model("sgpo/0", folder / "policy", "abc")
    with track(LOCAL, layout, "report", None, None) as tracker:
        tracker.champion(folder / "curve.parquet", "it was better", folder / "curve.parquet")
    shutil.rmtree(folder)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, tracking.address(LOCAL, layout))
    for alias in ("candidate", "champion"):
        loaded = mlflow.transformers.load_model(f"models:/winnow@{alias}")
        (found,) = loaded("4 + 3 =", max_new_tokens=8, return_full_text=False)
        assert found["generated_text"]


def test_system_metrics_are_recorded(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SECONDS", 0.01)
    with track(LOCAL, layout, "profile", None, None) as tracker:
        while len(tracker.points) < 2:
            time.sleep(0.01)
    metrics = runs_of(layout)["profile"].data.metrics
    assert 0 < metrics["system/system_memory_usage_percentage"] <= 100
    assert metrics["system/system_memory_usage_megabytes"] > 0


def test_rejected_event_is_logged_and_the_rest_recorded(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        tracker.params({"rate": 1})
        tracker.params({"rate": 2})
        tracker.metrics({"loss": 0.5}, step=1)
        tracker.flush()
        tracker.artifact(layout.root / "missing.txt")
    assert runs_of(layout)["train grpo/0"].data.metrics == {"loss": 0.5}
    assert "MLflow does not accept this params" in caplog.text
    assert "missing.txt does not exist" in caplog.text
    assert not (layout.tracking / "pending").exists()


@pytest.mark.parametrize(
    ("changed", "is_dirty"),
    [("dvc.lock", 0), ("data/report/plot.svg", 0)]
    + [("params.yaml", 1), ("tasks/loop.py", 1), ("recipes/grpo.yaml", 1)],
)
def test_commit_is_dirty_after_changes_that_no_run_makes(
    changed: str, is_dirty: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "project" / changed
    file.parent.mkdir(parents=True)
    file.write_text("old")
    monkeypatch.setattr(pipelines, "ROOT", commit_all(tmp_path) / "project")
    clean = pipelines.git_tags()
    assert len(clean["git"]) == 40
    file.write_text("new")
    assert pipelines.git_tags() == {**clean, "git": clean["git"] + "-dirty" * is_dirty}
