"""Exports in the hands of the trainers themselves: their loaders, rewards and, for TRL, training.

`make test-peers` installs each trainer in a folder of its own and names them in PEERS. NeMo-RL,
slime and open-instruct are not among them: only the schema of their files is tested, in
tests/train/external."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.train.external import check, export
from tasks.train.external.export import Options
from tasks.train.external.visits import of_recipe
from tests.train.external.conftest import SIZES, address, grading, make_root

__all__ = ["address", "grading"]  # fixtures

PEERS = os.environ.get("PEERS", "").split()
FOLDER = Path(os.environ.get("PEERS_FOLDER", ".venv-peers")).absolute()
TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"


@pytest.fixture
def layout(tmp_path: Path, guesser: Path) -> Layout:
    """Return a root whose policy has a chat template, as the trainers need."""
    policy = Path(shutil.copytree(guesser, tmp_path / "policy"))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(policy)
    return make_root(tmp_path / "data", policy)


def python_of(peer: str) -> str:
    if peer not in PEERS:
        pytest.skip(f"{peer} is not installed: make test-peers PEERS={peer}")
    return str(FOLDER / peer / "bin" / "python")


def exported(layout: Layout, out: Path, target: str) -> list[str]:
    """Export and check with the peer's loader; return the sentences of the check."""
    python, options = python_of(target), Options(target, is_unordered=True)
    values = params.load(layout.root / "params.yaml")
    visits = of_recipe(layout, values, "r", 0)
    manifest = export.export(visits, options, values, layout, "r/0", out)
    return list(check.check(visits, options, manifest, out, python))


def inside(peer: str, part: str, path: Path) -> Any:
    """Return what a part of inside.py prints in the peer's environment."""
    command = [python_of(peer), str(Path(__file__).with_name("inside.py")), part, str(path)]
    caches = {"HF_HOME": str(path.parents[1] / "cache"), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **caches, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["trl", "verifiers", "areal", "skyrl", "openrlhf"])
def test_loader_reads_every_visit_once_in_order(layout: Layout, tmp_path: Path, peer: str) -> None:
    sentences = exported(layout, tmp_path / "out", peer)
    loaded = [text.partition(f"{peer} ")[2].split(" ", 1) for text in sentences]
    assert [text for _, text in loaded] == [
        f"loads {number} visits in the plan's order" for number in (2, 3, 3)
    ]
    assert {version for version, _ in loaded} == {export.target_of(peer).version}


@pytest.mark.slow
def test_verl_samples_the_plans_group_of_each_prompt(
    layout: Layout, tmp_path: Path, address: str
) -> None:
    [sentence] = exported(layout, tmp_path / "out", "verl")
    assert "verl 0.9.1 loads 8 visits in the plan's order and group sizes" in sentence
    found = inside("verl", "verl_groups", tmp_path / "out/train.parquet")
    assert found == {"groups": SIZES, "reward": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "part", "suffix", "expected"),
    [
        ("verifiers", "verifiers_rewards", ".jsonl", [1.0, 1.0, 1.0]),
        ("skyrl", "skyrl_reward", ".parquet", 1.0),
        ("areal", "areal_reward", "", 1.0),
        (
            "openrlhf",
            "openrlhf_reward",
            ".jsonl",
            [{"rewards": [1.0], "scores": [1.0], "extra_logs": {}}],
        ),
    ],
)
def test_gold_is_rewarded_by_the_service(
    layout: Layout,
    tmp_path: Path,
    address: str,
    peer: str,
    part: str,
    suffix: str,
    expected: Any,
) -> None:
    exported(layout, tmp_path / "out", peer)
    assert inside(peer, part, tmp_path / f"out/segments/001_n4/train{suffix}") == expected


@pytest.mark.slow
def test_trl_trains_three_steps_from_an_export(
    layout: Layout, tmp_path: Path, address: str
) -> None:
    exported(layout, tmp_path / "out", "trl")
    found = inside("trl", "trl_steps", tmp_path / "out/segments/001_n4/train.parquet")
    assert found["trained"] == 3
    groups = [prompts for prompts, _ in found["steps"]]
    assert groups[0] == ["p2"] * 4 + ["p3"] * 4 + ["p4"] * 4
    assert all(reward in (0.0, 1.0) for _, rewards in found["steps"] for reward in rewards)


@pytest.mark.slow
def test_datasets_loads_a_saved_dataset(layout: Layout, tmp_path: Path) -> None:
    """TRL's environment has `datasets`, by which AReaL loads an export."""
    python_of("trl")
    values = params.load(layout.root / "params.yaml")
    visits = of_recipe(layout, values, "r", 0)
    export.export(visits, Options("areal"), values, layout, "r/0", tmp_path / "out")
    found = inside("trl", "saved_dataset", tmp_path / "out/segments/001_n4/train")
    assert found == [[{"role": "user", "content": "2+1+1 ="}], ["p2", "p3", "p4"]]
