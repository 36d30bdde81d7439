"""TRL as the trainer of a cell. Most tests need the extra `trl`."""

import copy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.code.effective import check_plan, check_trainer
from tasks.code.versions import packages_of
from tasks.common.accounting.spending import CellBudget
from tasks.common.artifacts import CURVE, STEPS, TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked
from tasks.common.params import ParamsError
from tasks.engines.settings import Sampling
from tasks.models.policy import load_tokenizer, open_policy
from tasks.train.data.rollouts import Rollouts
from tasks.train.external.trl_arguments import arguments_of
from tasks.train.loading import load_method, settings_of
from tasks.train.settings import TrainSettings
from tests.stages import run_stage
from tests.train.test_gradient import ADVANTAGES, OBJECTIVE, ROWS, gradient
from tests.train.test_gradient import step as step
from tests.train.worlds import make_world, write_params

CHANGES: dict[str, Any] = {
    "trainer": "trl",
    "batch": {"unit": "rollouts", "size": 8},
    "advantage": {"method": "grpo_sample"},
    "learning_rate": 0.01,
    "validation": {"num_samples": 1, "every_share": 0.5},
}
SIZES = [4] * 8 + [2] * 8  # two phases: four steps of two groups, then two steps of four groups


def settings(**changes: Any) -> TrainSettings:
    return settings_of({"trainer": "trl", "external": {"python": sys.executable}, **changes})


def arguments(**changes: Any) -> dict[str, Any]:
    sample = {"method": "grpo_sample"}
    return arguments_of(settings(**{"advantage": sample, **changes}), Sampling(max_tokens=8))


def test_recipes_map_to_the_arguments_of_trl() -> None:
    assert arguments()["loss_type"] == "dapo"
    gspo = {"method": "clip", "clip_low": 3e-4, "clip_high": 4e-4, "ratio": "sequence"}
    found = arguments(loss={**gspo, "normalize": "sequence"})
    assert (found["loss_type"], found["importance_sampling_level"]) == ("grpo", "sequence")
    assert (found["epsilon"], found["epsilon_high"]) == (3e-4, 4e-4)
    constant = {"method": "clip", "normalize": "constant"}
    found = arguments(advantage={"method": "dr_grpo"}, loss=constant)
    assert (found["loss_type"], found["scale_rewards"]) == ("dr_grpo", "none")
    assert arguments(loss={"method": "cispo", "cap": 4.0})["epsilon_high"] == 4.0
    assert arguments(loss={"method": "sapo"})["sapo_temperature_neg"] == 1.05
    assert arguments(advantage={"method": "grpo", "scale": "batch"})["scale_rewards"] == "batch"
    assert arguments(external={"python": "p", "arguments": {"top_p": 1.0}})["top_p"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": {"method": "grpo"}}, "sample deviation"),
        ({"branches": [0.5], "decay_share": 0.2}, r"train.branches is \[0.5\]"),
        ({"kl_coefficient": 0.1}, "train.kl_coefficient is 0.1"),
        ({"select": {"method": "mixed"}}, "train.select"),
        ({"updates": {"minibatches": 2}}, "train.updates"),
        ({"loss": {"method": "clip", "dual": 3.0}}, "train.loss"),
        ({"loss": {"method": "clip", "ratio": "sequence"}}, "ratio sequence only"),
        ({"loss": {"method": "kl_cov"}}, "train.loss"),
        ({"external": {"python": "p", "arguments": {"beta": 0.1}}}, "arguments.beta"),
    ],
)
def test_settings_without_an_equivalent_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        arguments(**changes)


def test_a_budget_of_unknown_compute_is_refused() -> None:
    budget = {"account": "executed", "amount": 1e9}
    values = {"experiment": {"recipes": ["r"], "seeds": [0], "budget": budget}}
    with pytest.raises(ParamsError, match="experiment.budget.account to charged, rollouts"):
        check_trainer(settings(advantage={"method": "grpo_sample"}), values)
    check_trainer(TrainSettings(), values)
    program = {"command": ["program"], "rollouts": {"format": "verl"}}
    with pytest.raises(ParamsError, match="experiment.budget.account to rollouts$"):
        check_trainer(settings(trainer="command", external=program), values)
    choosing = settings(trainer="command", control={"method": "greso"}, external=program)
    with pytest.raises(ParamsError, match="greso chooses prompts while it trains"):
        check_plan(choosing)


def test_the_packages_of_another_interpreter_count() -> None:
    found = packages_of(sys.executable)
    assert found[f"{sys.executable}: torch"] == torch.__version__
    with pytest.raises(ParamsError, match="train.external.python: /nowhere/python does not run"):
        packages_of("/nowhere/python")


def test_a_cell_is_trained_to_its_budget(guesser: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    layout = make_world(tmp_path, guesser, SIZES)
    CellBudget("rollouts", 44.0, 0.0).write(layout.plan("r", 0) / "budget.json")
    write_params(layout, train=CHANGES)
    run = run_stage("train", tmp_path / "params.yaml", tmp_path, "--recipe", "r", "--seed", "0")
    assert run.returncode == 0, run.output
    out = layout.train("r", 0)
    steps, curve = STEPS.read(out / "steps.parquet"), CURVE.read(out / "curve.parquet")
    rollouts = TRAIN_ROLLOUTS.read(out / "rollouts.parquet")
    # the second phase begins at its share of the plan, two thirds, and a sixth step would exceed
    assert steps["num_rollouts"].to_list() == [8] * 5
    assert steps["phase"].to_list() == [0, 0, 0, 0, 1]
    visited = rollouts.group_by("step", "group", maintain_order=True).agg(pl.col("prompt_id"))
    groups = [set(ids) for ids in visited["prompt_id"]]
    assert groups == [{f"p{n % 6}"} for n in range(12)]
    assert rollouts["sampler_logprobs"].null_count() == 40
    assert [point["rollouts"] for point in curve.to_dicts()] == [0, 24, 40]
    assert curve["flops_executed"].null_count() == 3
    flops = read_checked(out / "flops.json")
    assert flops["executed"] is None
    assert flops["budget"]["spent"] == 40
    assert flops["dropped_visits"] == 0
    lengths = rollouts["prompt_tokens"].sum() + rollouts["token_ids"].list.len().sum()
    assert flops["tokens"]["generate"] == lengths
    policy = read_checked(layout.policy_card)
    parameters = policy["num_matmul_parameters"]
    assert flops["charged"]["total"] == 8 * parameters * lengths
    trained = read_checked(out / "policy.json")["digest"]
    assert trained != policy["digest"]
    open_policy(out / "policy", trained, policy)


def test_a_kill_ends_trl_and_the_run_resumes(guesser: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    layout = make_world(tmp_path, guesser, [4] * 200)
    write_params(layout, train={**CHANGES, "max_steps": 60})
    command = [sys.executable, "-m", "tasks.train", "--params", str(tmp_path / "params.yaml")]
    command += ["--data", str(tmp_path), "--recipe", "r", "--seed", "0"]
    process = subprocess.Popen(command, start_new_session=True)
    saved = "checkpoints/*/session/session.json"
    while not (found := list(tmp_path.glob(saved))) and process.poll() is None:
        time.sleep(0.05)
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    trainers = [pid for pid in child if "trl_process" in cmdline(pid)]
    process.kill()
    process.wait()
    assert len(trainers) == 1
    while "trl_process" in cmdline(trainers[0]):
        time.sleep(0.05)
    num_steps = read_checked(found[0])["state"]["num_steps"]
    write_params(layout, train={**CHANGES, "max_steps": 60})
    run = run_stage("train", tmp_path / "params.yaml", tmp_path, "--recipe", "r", "--seed", "0")
    assert run.returncode == 0, run.output
    assert "not bit for bit" in run.output
    steps = STEPS.read(layout.train("r", 0) / "steps.parquet")
    assert num_steps >= 1
    assert steps["step"].to_list() == list(range(60))


def cmdline(pid: str) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""


class Stage:
    """A stage that gives the completions of a group different rewards."""

    def ask(self, about: str, **values: Any) -> Any:
        if about == "rewards":
            rewards = [float(n % 2) for n in range(len(values["visits"]))]
            return {"rewards": rewards, "learning_rate": 0.01}
        return {"stop": False, "save": None}


def test_two_segments_of_one_size_equal_one(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, optimizer and its moments go on in the next chunk. The completions are given, because
    each chunk has random numbers of its own."""
    pytest.importorskip("trl")
    from tasks.train.external import trl_process

    def completions(self: Any, prompt_ids: list[list[int]], *_: Any) -> Any:
        return [[ids[0], n % 5 + 3, ids[-1]] for n, ids in enumerate(prompt_ids)], None

    monkeypatch.setattr(trl_process.GRPOTrainer, "_generate_single_turn", completions)

    def trained(chunks: list[list[int]]) -> dict[str, torch.Tensor]:
        job = {
            "policy": str(guesser),
            "weights": str(guesser),
            "optimizer": None,
            "betas": [0.9, 0.95],
            "weight_decay": 0.0,
            "seed": 0,
            "arguments": {
                **arguments(),
                "output_dir": str(tmp_path),
                "use_cpu": True,
            },
        }
        found = trl_process.Session(Stage(), job)  # type: ignore[arg-type]
        step = {"num_generations": 4, "per_device_train_batch_size": 8}
        for visits in chunks:
            prompts = [f"{visit} + 1 =" for visit in visits]
            found.train({"prompts": prompts, "visits": visits, "arguments": step})
        return dict(found.model.state_dict())

    whole, parts = trained([list(range(8))]), trained([[0, 1, 2, 3], [4, 5, 6, 7]])
    initial = trained([])
    assert not torch.equal(initial["lm_head.weight"], whole["lm_head.weight"])
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0.0, atol=1e-6)


LOSSES = {
    "dapo": ({}, {}),
    "grpo": ({"normalize": "sequence"}, {}),
    "dr_grpo": ({"normalize": "constant"}, {"method": "dr_grpo"}),
    "gspo": ({"normalize": "sequence", "ratio": "sequence", "clip_low": 0.05}, {}),
    "cispo": ({"method": "cispo", "cap": 1.1}, {}),
    "sapo": ({"method": "sapo"}, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_batch_is_that_of_trl(
    name: str, step: tuple[Any, Rollouts], qwen: Path, tmp_path: Path
) -> None:
    """The rollouts are of a policy that differs by noise, so that ratios are clipped and capped."""
    pytest.importorskip("trl")
    from tasks.train.external.trl_process import Dataset, GRPOConfig, GRPOTrainer

    model, rollouts = step
    loss, advantage = LOSSES[name]
    loss = {"method": "clip", **loss}
    given = arguments(loss=loss, advantage={"method": "grpo_sample", **advantage})
    given["max_completion_length"] = 10
    lengths = rollouts.completion_tokens_B()
    shift_N = np.random.default_rng(0).normal(0.0, 0.3, int(lengths.sum()))
    ends = np.split(np.arange(len(shift_N)), np.cumsum(lengths)[:-1])
    old = [(rollouts.logprobs_N + shift_N)[end].tolist() for end in ends]
    rollouts = rollouts.with_columns(logprobs=old, old_logprobs=old)
    objective = replace(OBJECTIVE, loss=load_method("loss", settings(loss=loss).loss))
    ours = gradient(model, rollouts, ROWS, 64, objective)

    def padded(rows: list[list[Any]], *, left: bool) -> torch.Tensor:
        width = max(map(len, rows))
        empty = [[0] * (width - len(row)) for row in rows]
        pairs = zip(empty, rows, strict=True)
        return torch.tensor([gap + row if left else row + gap for gap, row in pairs])

    prompts, completions = (rollouts.table[key].to_list() for key in ("prompt", "token_ids"))
    ones = [[[1] * len(row) for row in rows] for rows in (prompts, completions)]
    trainer = GRPOTrainer(
        copy.deepcopy(model),
        reward_funcs=lambda **_: [],
        args=GRPOConfig(
            **{**given, "use_cpu": True, "output_dir": str(tmp_path), "report_to": "none"},
            per_device_train_batch_size=8,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
        processing_class=load_tokenizer(qwen),
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded(ones[0], left=True),
        "completion_ids": padded(completions, left=False),
        "completion_mask": padded(ones[1], left=False),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(lengths.sum())),
        "old_per_token_logps": padded(old, left=False),
    }
    trainer.model.train()
    trainer._compute_loss(trainer.model, inputs).backward()
    theirs = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-4, atol=1e-5)
    assert ours.abs().max() > 1e-3
