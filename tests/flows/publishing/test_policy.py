"""A policy is pushed complete with its origin, and overwrites nothing without a request."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, constants

from flows.publishing import policy
from flows.publishing.policy import push
from tasks.common.artifacts import Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError, digest_file, write_text
from tasks.common.locations import open_location
from tasks.models.folder import policy_digest

TEMPLATE = "additional_chat_templates/tools.jinja"
FILES = [
    *("README.md", TEMPLATE, "config.json", "curve.parquet", "forecast.json", "ledger.json"),
    *("metrics.json", "model.safetensors", "plan.parquet", "recipe.json"),
]
SETTINGS: dict[str, Any] = {  # as each stage notes its own
    "profile": {"num_samples": 8},
    "allocate": {"passes": 4},
    "recipe": "sgpo",
    "seed": 1,
    "train": {"learning_rate": 3.0e-4, "loss": {"method": "pg", "clip": 0.2}},
    "engine": {"dtype": "float32", "quantization": "fp8"},
    "sampling": {"top_p": 0.9},
    "verify": {"seconds": 10.0},
    "budget": None,
    "evaluate": {"num_samples": 8},
}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "data")
    train, plan = layout.train("sgpo", 1), layout.plan("sgpo", 1)
    for path in (
        train / "policy" / "config.json",
        train / "policy" / TEMPLATE,
        train / "policy" / "model.safetensors",
        train / "curve.parquet",
        plan / "plan.parquet",
        layout.profile / "profile.parquet",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())
    trained = policy_digest(train / "policy")
    write_checked(layout.trained_card("sgpo", 1), {"digest": trained})
    made = {**SETTINGS, "policy": "c509", "plan": digest_file(plan / "plan.parquet")}
    write_checked(train / "settings.json", {**made, "trained": trained})
    accounts = ("charged", "charged_mixed", "executed")
    spent = {"generate": 1e12, "score": 0.0, "update": 5e11, "evaluate": 7e11, "branch": 3e11}
    write_checked(train / "flops.json", dict.fromkeys(accounts, spent))
    write_checked(layout.profile / "flops.json", {name: {"profile": 2e11} for name in accounts})
    write_checked(layout.profile / "summary.json", {"settings": SETTINGS["profile"]})
    forecast = {"reads_profile": True, "settings": SETTINGS["allocate"]}
    forecast["profile"] = digest_file(layout.profile / "profile.parquet")
    write_checked(plan / "forecast.json", forecast)
    metrics = {"num_prompts": 256, "num_samples": 8, "pass_at_1": 0.653, "greedy": 0.742}
    metrics |= {"policy": trained, "settings": SETTINGS["evaluate"]}
    bounds = {"pass_at_1_low": 0.606, "pass_at_1_high": 0.698}
    write_checked(layout.evaluation("sgpo", 1) / "metrics.json", {**metrics, **bounds})
    origin = {"source": "hf://org/base@abc", "location": "/home/me/.cache/abc", "digest": "c509"}
    origin |= {"licence": "apache-2.0", "restored_from": "4-bit weights (Q4_1)"}
    write_checked(layout.policy_card, origin)
    # a value that has changed since the training
    write_text(layout.code("train", "sgpo").with_suffix(".params.yaml"), "train: {max_steps: 6}")
    return layout


def test_a_folder_has_the_policy_with_its_settings(layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "out"
    assert push(layout, "sgpo", 1, str(place), overwrite=False) == FILES
    assert (place / TEMPLATE).read_bytes() == b"tools.jinja"
    assert (place / "model.safetensors").read_bytes() == b"model.safetensors"
    assert json.loads((place / "recipe.json").read_text()) == SETTINGS
    head, card = (place / "README.md").read_text().split("\n---\n", 1)
    described = yaml.safe_load(head.removeprefix("---"))
    assert described["base_model"] == "org/base"
    assert described["license"] == "apache-2.0"
    assert "(digest `c509`; restored from 4-bit weights (Q4_1))" in card
    assert described["library_name"] == "transformers"
    assert "65.3% (95 % interval 60.6% to 69.8%), greedy 74.2%" in card
    assert "| charged | 1.7e+12 |" in card  # training and profile, without validation
    assert "| executed | 1.7e+12 |" in card
    assert "from `hf://org/base@abc`" in card  # and not from a folder of this machine


def test_an_unfinished_or_damaged_cell_is_not_pushed(layout: Layout, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"grpo/0 has no .*policy: create it with `winnow run`"):
        push(layout, "grpo", 0, str(tmp_path / "out"), overwrite=False)
    (layout.train("sgpo", 1) / "policy" / "model.safetensors").write_bytes(b"model.safetensorz")
    with pytest.raises(ArtifactError, match="is not what training wrote .* Delete it"):
        push(layout, "sgpo", 1, str(tmp_path / "out"), overwrite=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "key", "message"),
    [
        ("runs/sgpo/1/eval/metrics.json", "policy", "policy"),
        ("runs/sgpo/1/train/settings.json", "trained", "policy"),
        ("runs/sgpo/1/train/settings.json", "policy", "initial policy"),
        ("runs/sgpo/1/train/settings.json", "plan", "plan"),
        ("runs/sgpo/1/plan/forecast.json", "profile", "profile"),
    ],
)
def test_numbers_of_another_policy_are_not_pushed(
    file: str, key: str, message: str, layout: Layout, tmp_path: Path
) -> None:
    """A stage ran again, and the stages after it did not."""
    path = layout.root / file
    write_checked(path, {**read_checked(path), key: "77b0"})
    named = (
        rf"{path.name} is of another {message} \(77b0\) than the present one \(.*\): bring it up"
    )
    with pytest.raises(ArtifactError, match=named):
        push(layout, "sgpo", 1, str(tmp_path / "out"), overwrite=False)
    assert not (tmp_path / "out").exists()


def test_existing_files_are_replaced_only_on_request(layout: Layout, tmp_path: Path) -> None:
    """A former policy goes as a whole: its template or adapter would be used with the new one."""
    place = tmp_path / "out"
    mine = ("mine.txt", "mine.json", "notes/mine.json")
    former = ("chat_template.jinja", "merges.txt", "generation_config.json", "adapter_config.json")
    for name in (*mine, *former):
        write_text(place / name, "mine")
    with pytest.raises(ArtifactError, match="is not empty: use another place, or --overwrite"):
        push(layout, "sgpo", 1, str(place), overwrite=False)
    assert (place / "chat_template.jinja").exists()
    push(layout, "sgpo", 1, str(place), overwrite=True)
    left = {path.relative_to(place).as_posix() for path in place.rglob("*.*")}
    assert left == {*FILES, *mine}
    policy = layout.train("sgpo", 1) / "policy"
    for own in (policy, policy / "copy", layout.train("grpo", 0) / "policy", layout.policy):
        with pytest.raises(ArtifactError, match="has the pipeline's own files: push to another"):
            push(layout, "sgpo", 1, str(own), overwrite=True)


def test_an_incomplete_copy_cannot_be_loaded(layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "out"
    push(layout, "sgpo", 1, str(place), overwrite=False)
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").mkdir()  # cannot be written over
    with pytest.raises(ArtifactError):
        push(layout, "sgpo", 1, str(place), overwrite=True)
    assert not {"README.md", "config.json"} & {path.name for path in place.iterdir()}


@pytest.mark.s3
def test_a_policy_is_pushed_to_a_bucket(layout: Layout, bucket: str) -> None:
    place = f"{bucket}/policies/sgpo"
    push(layout, "sgpo", 1, place, overwrite=False)
    store, path = open_location(place)
    assert [name.removeprefix(f"{path}/") for name in store.find(path)] == FILES
    with pytest.raises(ArtifactError, match="is not empty"):
        push(layout, "sgpo", 1, place, overwrite=False)
    store.pipe_file(f"{path}/chat_template.jinja", b"of a former policy")
    push(layout, "sgpo", 1, place, overwrite=True)
    assert [name.removeprefix(f"{path}/") for name in store.find(path)] == FILES


def test_a_hub_gets_one_commit_and_a_private_repository(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hub can be reached from here, so the calls of its client are checked."""
    calls: list[tuple[str, Any]] = []

    class Hub:
        def repo_exists(self, name: str) -> bool:
            return any(call == "create" for call, _ in calls)

        def create_repo(self, name: str, **options: Any) -> None:
            calls.append(("create", (name, options)))

        def create_commit(self, name: str, operations: Any, **options: Any) -> None:
            calls.append(("commit", [operation.path_in_repo for operation in operations]))

        def list_repo_files(self, name: str) -> list[str]:
            return ["chat_template.jinja", "mine.json", "notes/mine.json"]

    monkeypatch.setattr(policy, "HfApi", Hub)
    push(layout, "sgpo", 1, "hf://me/mine", overwrite=False)
    assert calls[0] == ("create", ("me/mine", {"private": True, "exist_ok": True}))
    assert calls[1] == ("commit", FILES)
    with pytest.raises(ArtifactError, match="hf://me/mine has a model"):
        push(layout, "sgpo", 1, "hf://me/mine", overwrite=False)
    assert len(calls) == 2
    push(layout, "sgpo", 1, "hf://me/mine", overwrite=True)
    assert calls[3] == ("commit", [*FILES, "chat_template.jinja"])


def test_an_unreachable_hub_gives_one_sentence(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = functools.partial(HfApi, endpoint="http://127.0.0.1:9")  # no server listens there
    monkeypatch.setattr(policy, "HfApi", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ArtifactError, match=r"^hf://me/mine: [^\n]*refused[^\n]*$"):
        push(layout, "sgpo", 1, "hf://me/mine", overwrite=False)
