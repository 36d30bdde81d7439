"""A program as the trainer of a cell."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.common.accounting.spending import CellBudget
from tasks.common.artifacts import CURVE, STEPS, TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked
from tasks.common.params import ParamsError
from tasks.models.policy import open_policy
from tasks.train.loading import settings_of
from tests.stages import Result, run_stage
from tests.train.worlds import make_world, write_params

# Samples "7" and "8" for every visit, has them graded, and doubles the weights of the norms.
PROGRAM = """
import json, pathlib, sys, urllib.request
import polars as pl
from safetensors.torch import load_file, save_file

policy, data, n, out, seed, grader = sys.argv[1:]
visits = pl.read_parquet(data)
rows = [
    {
        "input": row["prompt"],
        "output": str(7 + k % 2),
        "gts": row["ground_truth"],
        "step": 1 + number // 3,
    }
    for number, row in enumerate(visits.to_dicts())
    for k in range(int(n))
]
body = [{"completion": row["output"], "label": row["gts"]} for row in rows]
with urllib.request.urlopen(f"{grader}/grade", json.dumps(body).encode()) as response:
    verdicts = json.load(response)
if (pathlib.Path(out) / "broken").exists():
    sys.exit(3)
folder = pathlib.Path(out) / "rollouts"
folder.mkdir(exist_ok=True)
with (folder / "1.jsonl").open("w") as file:
    for row, verdict in zip(rows, verdicts, strict=True):
        file.write(json.dumps({**row, "score": verdict["reward"]}) + "\\n")
weights = load_file(f"{policy}/model.safetensors")
weights = {name: 2 * w if "norm" in name else w for name, w in weights.items()}
(pathlib.Path(out) / "policy").mkdir(exist_ok=True)
save_file(weights, f"{out}/policy/model.safetensors", {"format": "pt"})
"""
NAMES = ("policy", "data", "n", "out", "seed", "grader")
SIZES = [2] * 4 + [4] * 4


def train(root: Path, policy: Path, budget: CellBudget | None = None, **more: Any) -> Result:
    layout = make_world(root, policy, SIZES)
    if budget is not None:
        budget.write(layout.plan("r", 0) / "budget.json")
    program = root / "program.py"
    program.write_text(PROGRAM)
    external = {
        "command": [sys.executable, str(program), *(f"{{{name}}}" for name in NAMES)],
        "target": "trl",
        "rollouts": {"format": "verl"},
        **more,
    }
    write_params(layout, train={"trainer": "command", "external": external})
    return run_stage("train", root / "params.yaml", root, "--recipe", "r", "--seed", "0")


def test_a_program_trains_segment_after_segment(guesser: Path, tmp_path: Path) -> None:
    run = train(tmp_path, guesser)
    assert run.returncode == 0, run.output
    out = tmp_path / "runs/r/0/train"
    steps, curve = STEPS.read(out / "steps.parquet"), CURVE.read(out / "curve.parquet")
    assert steps["num_rollouts"].to_list() == [6, 2, 12, 4]
    assert steps["num_mixed_groups"].to_list() == [3, 1, 3, 1]
    assert curve["rollouts"].to_list() == [0, 8, 24]
    rollouts = TRAIN_ROLLOUTS.read(out / "rollouts.parquet")
    assert rollouts.filter(text="7")["reward"].to_list() == [1.0] * 12
    assert rollouts.group_by("prompt_id").len().sort("prompt_id")["len"].to_list() == [
        *(6, 6, 2, 2),  # p0 and p1 are visited in both phases
        *(4, 4),
    ]
    flops = read_checked(out / "flops.json")
    assert flops["rollouts"]["generate"] == 24
    assert flops["executed"] is None
    card = read_checked(tmp_path / "policy.json")
    open_policy(out / "policy", read_checked(out / "policy.json")["digest"], card)
    from safetensors.torch import load_file

    before, after = (load_file(each / "model.safetensors") for each in (guesser, out / "policy"))
    norm = next(name for name in before if "norm" in name)
    assert (after[norm] == 4 * before[norm]).all()


def test_a_budget_in_rollouts_cuts_the_plan(guesser: Path, tmp_path: Path) -> None:
    run = train(tmp_path, guesser, CellBudget("rollouts", 16.0, 3.0))
    assert run.returncode == 0, run.output
    flops = read_checked(tmp_path / "runs/r/0/train/flops.json")
    assert flops["budget"] == {"account": "rollouts", "amount": 16.0, "profile": 3.0, "spent": 15}
    run = train(tmp_path / "less", guesser, CellBudget("rollouts", 4.0, 3.0))
    assert "experiment.budget.amount, less the profile, is below the first group" in run.output
    run = train(tmp_path / "other", guesser, CellBudget("charged", 1e9, 0.0))
    assert "train.trainer is command, and the budget is in charged" in run.output


def test_a_failed_program_is_run_again_for_its_segment_alone(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    assert train(tmp_path, guesser, checkpoint="nothing").returncode == 1
    (folder,) = layout.checkpoints.glob("*/segments/000")
    assert (folder / "policy").exists()
    run = train(tmp_path, guesser)  # other settings: from the beginning
    assert run.returncode == 0, run.output
    broken = tmp_path / "broken"
    first = train(broken, guesser, target="slime")  # which is no Parquet
    assert "train.external.command ended with status 1" in first.output


def test_a_command_needs_a_program_and_dumps() -> None:
    with pytest.raises(ParamsError, match=r"set train.external.command"):
        settings_of({"trainer": "command"})
    with pytest.raises(ParamsError, match="pickle"):
        settings_of({"external": {"rollouts": {"format": "pickle"}}})
