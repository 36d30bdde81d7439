"""A policy is pushed complete with its origin, and overwrites nothing without a request."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, constants

from tasks.common.artifacts import Layout
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError
from tasks.common.locations import open_location
from tasks.models.folder import policy_digest
from tasks.publishing import policy
from tasks.publishing.policy import TrainedPolicy, push

CELL = TrainedPolicy("sgpo", 1)
FILES = [
    *("README.md", "config.json", "curve.parquet", "forecast.json", "ledger.json"),
    *("metrics.json", "model.safetensors", "plan.parquet", "recipe.json"),
]
VALUES = {
    "experiment": {"recipes": ["grpo", "sgpo"], "seeds": [0, 1]},
    "sampling": {"temperature": 1.0},
    "allocate": {"passes": 4},
    "train": {"learning_rate": 1.0e-4, "loss": {"method": "pg"}},
    "recipes": {
        "grpo": {"allocate": {"strategy": "uniform"}, "train": {}},
        "sgpo": {"allocate": {"strategy": "sgpo"}, "train": {"learning_rate": 3.0e-4}},
    },
}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return one finished cell, sgpo/1."""
    layout = Layout(tmp_path / "data")
    train, plan = layout.train("sgpo", 1), layout.plan("sgpo", 1)
    for path in (
        train / "policy" / "config.json",
        train / "policy" / "model.safetensors",
        train / "curve.parquet",
        plan / "plan.parquet",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())
    write_checked(layout.trained_card("sgpo", 1), {"digest": policy_digest(train / "policy")})
    accounts = ("charged", "charged_mixed", "executed")
    spent = {"generate": 1e12, "score": 0.0, "update": 5e11, "evaluate": 7e11, "branch": 3e11}
    write_checked(train / "flops.json", dict.fromkeys(accounts, spent))
    write_checked(layout.profile / "flops.json", {name: {"profile": 2e11} for name in accounts})
    write_checked(plan / "forecast.json", {"reads_profile": True})
    metrics = {"num_prompts": 256, "num_samples": 8, "pass_at_1": 0.653, "greedy": 0.742}
    bounds = {"pass_at_1_low": 0.606, "pass_at_1_high": 0.698}
    write_checked(layout.evaluation("sgpo", 1) / "metrics.json", {**metrics, **bounds})
    origin = {"source": "hf://org/base@abc", "location": "hf://org/base@abc", "digest": "c509"}
    write_checked(layout.policy_card, origin)
    return layout


def test_a_folder_has_the_policy_and_its_origin(layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "out"
    assert push(layout, VALUES, CELL, str(place), overwrite=False) == FILES
    assert sorted(path.name for path in place.iterdir()) == FILES
    assert (place / "model.safetensors").read_bytes() == b"model.safetensors"
    recipe = json.loads((place / "recipe.json").read_text())
    assert recipe["train"] == {"learning_rate": 3.0e-4, "loss": {"method": "pg"}}
    assert recipe["allocate"] == {"passes": 4, "strategy": "sgpo"}
    head, card = (place / "README.md").read_text().split("\n---\n", 1)
    described = yaml.safe_load(head.removeprefix("---"))
    assert described["base_model"] == "org/base"
    assert described["library_name"] == "transformers"
    assert "65.3% (95 % interval 60.6% to 69.8%), greedy 74.2%" in card
    assert "| charged | 1.7e+12 |" in card  # training and profile, without validation
    assert "| executed | 1.7e+12 |" in card


def test_the_settings_are_the_complete_ones_of_the_cell(layout: Layout, tmp_path: Path) -> None:
    """The stage `code` wrote them with the defaults."""
    whole = {"learning_rate": 3.0e-4, "loss": {"method": "pg", "clip": 0.2}}
    path = layout.code_folder / "sgpo" / "train.params.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({"train": whole}))
    push(layout, VALUES, CELL, str(tmp_path / "out"), overwrite=False)
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert recipe["train"] == whole
    assert recipe["allocate"] == {"passes": 4, "strategy": "sgpo"}
    assert (recipe["sampling"]["top_p"], recipe["profile"]) == (1.0, {"num_samples": 8})


def test_damaged_weights_are_not_pushed(layout: Layout, tmp_path: Path) -> None:
    (layout.train("sgpo", 1) / "policy" / "model.safetensors").write_bytes(b"model.safetensorz")
    with pytest.raises(ArtifactError, match="is not what training wrote .* Delete it"):
        push(layout, VALUES, CELL, str(tmp_path / "out"), overwrite=False)
    assert not (tmp_path / "out").exists()


def test_existing_files_are_replaced_only_on_request(layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not empty: use another place, or --overwrite"):
        push(layout, VALUES, CELL, str(place), overwrite=False)
    assert [path.name for path in place.iterdir()] == ["mine.txt"]
    push(layout, VALUES, CELL, str(place), overwrite=True)
    assert (place / "mine.txt").read_text() == "mine"


def test_an_incomplete_copy_has_no_card(layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "out"
    push(layout, VALUES, CELL, str(place), overwrite=False)
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").mkdir()  # cannot be written over
    with pytest.raises(ArtifactError):
        push(layout, VALUES, CELL, str(place), overwrite=True)
    assert not (place / "README.md").exists()


def test_an_unfinished_cell_is_named(layout: Layout, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"grpo/0 has no .*policy: run the pipeline first"):
        push(layout, VALUES, TrainedPolicy("grpo", 0), str(tmp_path / "out"), overwrite=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.s3
def test_a_policy_is_pushed_to_a_bucket(layout: Layout, bucket: str) -> None:
    place = f"{bucket}/policies/sgpo"
    push(layout, VALUES, CELL, place, overwrite=False)
    store, path = open_location(place)
    assert sorted(Path(name).name for name in store.ls(path)) == FILES
    with pytest.raises(ArtifactError, match="is not empty"):
        push(layout, VALUES, CELL, place, overwrite=False)


def test_a_hub_gets_one_commit_and_a_private_repository(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hub can be reached from here, so the calls of its client are checked."""
    calls: list[tuple[str, Any]] = []

    class Hub:
        def repo_exists(self, name: str) -> bool:
            return any(call == "create" for call, _ in calls)

        def file_exists(self, name: str, path: str) -> bool:
            return path == "README.md"

        def create_repo(self, name: str, **options: Any) -> None:
            calls.append(("create", (name, options)))

        def create_commit(self, name: str, operations: Any, **options: Any) -> None:
            calls.append(("commit", [operation.path_in_repo for operation in operations]))

    monkeypatch.setattr(policy, "HfApi", Hub)
    push(layout, VALUES, CELL, "hf://me/mine", overwrite=False)
    assert calls[0] == ("create", ("me/mine", {"private": True, "exist_ok": True}))
    assert calls[1] == ("commit", FILES)
    with pytest.raises(ArtifactError, match="hf://me/mine has a model"):
        push(layout, VALUES, CELL, "hf://me/mine", overwrite=False)
    assert len(calls) == 2


def test_an_unreachable_hub_gives_one_sentence(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = functools.partial(HfApi, endpoint="http://127.0.0.1:9")  # no server listens there
    monkeypatch.setattr(policy, "HfApi", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ArtifactError, match=r"^hf://me/mine: [^\n]*refused[^\n]*$"):
        push(layout, VALUES, CELL, "hf://me/mine", overwrite=False)
