"""Whole runs of the stage: a run follows its plan, and a killed run ends like an uninterrupted
one."""

import os
import random
import signal
import time
from pathlib import Path

import polars as pl
import pytest

from tasks.common.artifacts import PLAN, Layout
from tasks.common.checksums import read_checked
from tasks.models.folder import policy_digest
from tasks.models.policy import load_tokenizer, read_policy
from tests.once import once
from tests.stages import Forked, Result, run_stage
from tests.train.recorded import check_repeated
from tests.train.worlds import make_world, outputs, write_params

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]


def train(layout: Layout, *options: str) -> Result:
    """Run the command in this process."""
    coordinates = ("--recipe", "r", "--seed", "0", *options)
    return run_stage("train", layout.root / "params.yaml", layout.root, *coordinates)


def fork(layout: Layout) -> Forked:
    """Run the command in a separate process, to be interrupted or killed."""
    params = layout.root / "params.yaml"
    return Forked("train", params, layout.root, "--recipe", "r", "--seed", "0")


@pytest.fixture(scope="module")
def finished(guesser: Path) -> Layout:
    """Return an uninterrupted run."""

    def make(folder: Path) -> None:
        process = train(make_world(folder, guesser, SIZES * 8))
        assert process.returncode == 0, process.output

    return Layout(once("finished", make))


def test_a_run_follows_its_plan_and_its_ledger_is_consistent(finished: Layout) -> None:
    out = outputs(finished)
    plan = PLAN.read(finished.plan("r", 0) / "plan.parquet")
    rollouts = pl.DataFrame(out["rollouts"])
    groups = rollouts.group_by("step", "group", maintain_order=True).agg(
        pl.len(), pl.col("prompt_id").first()
    )
    assert groups["prompt_id"].to_list() == plan["prompt_id"].to_list()
    assert groups["len"].to_list() == plan["group_size"].to_list()
    steps = pl.DataFrame(out["steps"])
    assert steps["step"].to_list() == list(range(len(steps)))
    # the last step of a phase includes the remainder
    assert (steps["num_rollouts"] > 12).sum() <= 2
    assert (steps["num_rollouts"] < 18).all()
    # the sampler had the trainer's weights at every step
    assert steps["log_ratio_max"].max() < 1e-3
    tokens = sum(row["prompt_tokens"] + len(row["token_ids"]) for row in out["rollouts"])
    ledger, policy = read_checked(finished.train("r", 0) / "flops.json"), read_policy(finished)
    size = policy.architecture.num_matmul_parameters
    assert ledger["charged"]["total"] == pytest.approx(8 * size * tokens)
    assert ledger["charged_paper"]["total"] == pytest.approx(8 * size * tokens)
    assert ledger["tokens"]["generate"] == tokens
    # dead groups were not computed
    assert ledger["executed"]["update"] < ledger["charged"]["update"]
    assert steps["flops_charged"][-1] == pytest.approx(ledger["charged"]["total"])
    curve = pl.DataFrame(out["curve"])
    assert (curve["step"][0], curve["step"][-1]) == (0, len(steps))
    # a point at the start, and the first step at which each quarter of the plan is done
    done = (steps["num_rollouts"].cum_sum() / plan["group_size"].sum()).to_list()
    quarters = [next(i for i, d in enumerate(done) if d >= n / 4 - 1e-9) + 1 for n in range(1, 5)]
    assert curve["step"].to_list() == [0, *quarters]
    assert curve["flops_charged"].to_list()[1:] == [
        steps["flops_charged"][step - 1] for step in curve["step"].to_list()[1:]
    ]
    trained = finished.train("r", 0) / "policy"
    assert policy_digest(trained) != policy.digest
    first, second = (load_tokenizer(folder)("1+1") for folder in (trained, policy.folder))
    assert first.input_ids == second.input_ids
    assert list(finished.checkpoints.iterdir()) == []


def stop(layout: Layout, by: signal.Signals, returncode: int, delay: float = 0.0) -> str:
    """Run until a signal, sent `delay` seconds after a new checkpoint. Return the output."""
    before = set(layout.checkpoints.glob("*/step-*"))
    process = fork(layout)
    while set(layout.checkpoints.glob("*/step-*")) <= before and process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(by)
    output = process.finish()
    assert process.returncode == returncode, f"the run ended before the signal: {output}"
    assert not layout.train("r", 0).exists()
    return output


@pytest.mark.slow
def test_a_run_killed_at_random_ends_like_an_uninterrupted_one(
    finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    layout, rng = make_world(tmp_path, guesser, SIZES * 8), random.Random(1)
    for _ in range(3):
        stop(layout, signal.SIGKILL, -signal.SIGKILL, rng.uniform(0.0, 0.25))
    process = train(layout)
    assert process.returncode == 0, process.output
    assert "resumed after" in process.output
    assert outputs(layout) == outputs(finished)
    lost = read_checked(layout.measured("r-0"))["lost"]
    assert set(lost) == {"flops", "seconds", "tokens"}


@pytest.mark.slow
def test_interrupted_runs_write_checkpoints(
    finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 8)
    assert "run the same command again to resume" in stop(layout, signal.SIGINT, 130)
    newest = max(layout.checkpoints.glob("*/step-*"))
    with (newest / "tensors.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    assert f"skipping the damaged checkpoint {newest}" in stop(layout, signal.SIGTERM, 130)
    oldest = min(layout.checkpoints.glob("*/step-*"))
    write_params(layout, train={"weight_decay": 0.1})
    process = train(layout, "--resume", str(oldest))
    assert process.returncode == 1
    assert "belongs to another run: train differ" in process.output
    write_params(layout)
    process = train(layout, "--resume", str(oldest))
    assert f"resumed after {int(oldest.name.split('-')[1])} steps" in process.output
    assert outputs(layout) == outputs(finished)


def test_changed_parameters_and_code_change_the_key(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    gaps = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
    write_params(layout, guards={"max_sampler_gap": gaps})
    process = train(layout)  # no sampler reaches a gap of 0
    assert process.returncode == 1
    assert "over guards.max_sampler_gap 0: " in process.output
    assert not layout.train("r", 0).exists()
    write_params(layout, train={"learning_rate": 2.0e-3})
    layout.code("train", "r").parent.mkdir(parents=True)
    layout.code("train", "r").write_text('{"files": {"a.py": "91c0"}}')
    process = train(layout)
    assert process.returncode == 0
    assert "starting over: train, code changed since the checkpoint" in process.output
    assert "1 of 12 visits have a group of one" in process.output


def test_truncated_sampling_is_refused(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    write_params(layout, sampling={"top_p": 0.7})
    process = train(layout)
    assert process.returncode == 1
    assert "training needs sampling.temperature > 0, top_p 1.0" in process.output


def test_updates_are_reproduced_from_stored_rollouts(
    finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    again = make_world(tmp_path, guesser, SIZES * 8)
    check_repeated(finished, again, {})
    assert outputs(again) == outputs(finished)


def test_nonfinite_steps_are_skipped_and_then_stop_the_run(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 2)
    write_params(layout, train={"learning_rate": 1.0e38})
    process = train(layout)
    log = process.output
    assert process.returncode == 1
    assert log.count("; the step is skipped") == 2
    assert "loss, gradient or log-probabilities are not finite; prompts: p" in log
    assert "3 steps in a row (guards.max_nonfinite_steps)" in log
