"""All stages by the commands that a user runs: with real prompts, a model with a real BPE
tokenizer, and vLLM."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from flows.publishing.policy import push
from tasks.common.artifacts import CURVE, DECISIONS, PROFILE, PROMPTS, STEPS, TRAIN_ROLLOUTS, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import read_json
from tests.parameters import every_value
from tests.policies import make_policy
from tests.stages import run_stage
from tests.train.worlds import make_world


def command(root: Path, stage: str, *coordinates: str) -> str:
    """Run one stage as a user would, in a new process, and return its log."""
    paths = ["--params", str(root / "params.yaml"), "--data", str(root / "data")]
    line = [sys.executable, "-m", f"tasks.{stage}", *paths, *coordinates]
    process = subprocess.run(line, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stderr + process.stdout


def run(root: Path, stage: str, *coordinates: str, ok: bool = True) -> str:
    """Run one stage in this process, which is faster, and return its log."""
    result = run_stage(stage, root / "params.yaml", root / "data", *coordinates)
    assert (result.returncode == 0) == ok, result.output
    return result.output


def settings(**changes: Any) -> dict[str, Any]:
    """Return the project's own params.yaml with changed sections."""
    values = every_value()
    for name, change in changes.items():
        values[name] = {**values[name], **change}
    return values


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.usefixtures("forked_stages")
def test_gsm8k_on_a_small_hugging_face_model(real_data: Path, tmp_path: Path) -> None:
    lines = (real_data / "gsm8k" / "train.jsonl").read_text().splitlines()
    corpus = [json.loads(line)["question"] + json.loads(line)["answer"] for line in lines[:200]]
    make_policy(tmp_path / "llama", "llama", corpus, max_length=1024)
    values = settings(
        experiment={"recipes": ["grpo", "sgpo"]},
        ingest={
            "splits": {"train": 64, "validation": 16, "test": 24},
            "sources": [
                {"preset": "gsm8k", "settings": {"path": str(real_data / "gsm8k" / "train.jsonl")}}
            ],
        },
        policy={"source": str(tmp_path / "llama")},
        sampling={"max_tokens": 24},
        profile={"num_samples": 2},
        evaluate={"num_samples": 2, "pass_at": [1, 2]},
        train={"max_steps": 5},
        gates={"min_solved_rate": 0.0, "max_truncated_rate": 1.0},  # its weights are random
    )
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    layout = Layout(tmp_path / "data")
    run(tmp_path, "ingest")
    prompts = PROMPTS.read(layout.prompts("train"))
    assert len(prompts) == 64
    assert set(prompts["prompt"]) <= {json.loads(line)["question"] for line in lines}
    assert not any("," in answer for answer in prompts["answer"])
    run(tmp_path, "policy")
    card = read_checked(layout.policy_card)
    assert (card["architecture"], card["location"]) == ("LlamaForCausalLM", str(tmp_path / "llama"))
    run(tmp_path, "profile")
    profile = PROFILE.read(layout.profile / "profile.parquet")
    assert (len(profile), profile["num_samples"].sum()) == (64, 128)
    run(tmp_path, "evaluate")
    for recipe, start in (("grpo", run), ("sgpo", command)):
        log = run(tmp_path, "allocate", "--recipe", recipe, "--seed", "0")
        # random weights solve nothing
        assert "OF 64 PROMPTS WERE SOLVED SOMETIMES BUT NOT ALWAYS" in log
        assert len(DECISIONS.read(layout.plan(recipe, 0) / "decisions.parquet")) == 64
        start(tmp_path, "train", "--recipe", recipe, "--seed", "0")
        run(tmp_path, "evaluate", "--recipe", recipe, "--seed", "0")
        out = layout.train(recipe, 0)
        steps = STEPS.read(out / "steps.parquet")
        assert len(steps) == 5
        rollouts = TRAIN_ROLLOUTS.read(out / "rollouts.parquet")
        assert len(rollouts) == steps["num_rollouts"].sum()
        assert CURVE.read(out / "curve.parquet")["step"].to_list()[-1] == 5
    run(tmp_path, "report")
    board = read_json(layout.report / "leaderboard.json")
    assert {(row["recipe"], row["seed"]) for row in board} == {("grpo", 0), ("sgpo", 0)}
    by_recipe = {row["recipe"]: row for row in board}
    assert by_recipe["grpo"]["flops_charged"]["profile"] == 0.0
    assert by_recipe["sgpo"]["flops_charged"]["profile"] > 0.0
    values["train"]["max_steps"] = 6
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    push(layout, "sgpo", 0, str(tmp_path / "out"), overwrite=False)
    pushed = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert (pushed["train"]["max_steps"], pushed["allocate"]["strategy"]) == (5, "sgpo")
    assert (pushed["profile"]["num_samples"], pushed["evaluate"]["pass_at"]) == (2, [1, 2])
    benchmark = [sys.executable, "-m", "tests.bench.stage_start", str(layout.root)]
    benchmark += ["--repeat", "1", "--stages", "report"]
    measured = subprocess.run(benchmark, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in measured.splitlines()] == ["report"]


@pytest.mark.slow
@pytest.mark.vllm
def test_stages_with_vllm(guesser: Path, tmp_path: Path) -> None:
    """The profile runs vLLM in the stage, and the training starts a vLLM server. A second profile
    with another engine reuses all rollouts of the store."""
    layout = make_world(tmp_path / "data", guesser, [4, 3, 2, 4] * 3)
    values = yaml.safe_load((tmp_path / "data" / "params.yaml").read_text()) | {
        "profile": {"num_samples": 6}
    }

    def use(engine: str) -> None:
        values["engine"]["name"] = engine
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))

    use("vllm")
    assert "36 sampled" in run(tmp_path, "profile")
    sampled = pl.read_parquet(layout.profile / "rollouts.parquet")
    assert 0 < sampled["reward"].mean() < 1  # type: ignore[operator]
    use("server")
    run(tmp_path, "train", "--recipe", "r", "--seed", "0")
    steps = STEPS.read(layout.train("r", 0) / "steps.parquet")
    assert steps["updated"].any()
    assert steps["log_ratio_max"].max() < 1e-3  # type: ignore[operator]
    use("hf")
    assert "36 rollouts reused, 0 sampled" in run(tmp_path, "profile")
    assert pl.read_parquet(layout.profile / "rollouts.parquet").equals(sampled)


def test_training_through_servers_under_urls_is_refused(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path / "data", guesser, [4, 4])
    values = yaml.safe_load((tmp_path / "data" / "params.yaml").read_text())
    values["engine"] |= {"name": "server", "urls": ["http://127.0.0.1:9/v1"]}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    log = run(tmp_path, "train", "--recipe", "r", "--seed", "0", ok=False)
    assert (
        "training replaces the policy's weights after every step, which it must not do in servers"
        in log
    )
    assert "Traceback" not in log
    assert not layout.train("r", 0).exists()


def test_unknown_key_is_named(guesser: Path, tmp_path: Path) -> None:
    make_world(tmp_path / "data", guesser, [4, 4])
    values = yaml.safe_load((tmp_path / "data" / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values | {"profile": {"num_sample": 6}}))
    log = run(tmp_path, "profile", ok=False)
    assert "profile.num_sample is unknown; allowed: num_samples" in log
