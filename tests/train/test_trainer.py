"""The loop: gradients do not depend on packing or on skipping, a killed run ends as if it had not
been killed."""

import copy
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from tasks.common.artifacts import PLAN, TRAIN_ROLLOUTS, Layout
from tasks.common.files import ArtifactError
from tasks.common.sealed import read_sealed
from tasks.engines.engine import Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models import packing
from tasks.models.folder import policy_digest
from tasks.models.forward_check import check_forward
from tasks.models.policy import load_model, load_tokenizer, read_policy
from tasks.train.learner.correction import corrected_tokens
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import (
    Objective,
    accumulate_gradients,
    enable_activation_checkpointing,
    k3,
    learning_rate,
    token_logprobs,
    unbiased_kl,
)
from tasks.train.methods import control as control_methods
from tasks.train.methods.advantage import probe
from tasks.train.methods.loss import clip
from tasks.train.rollouts import Rollouts, StepTotals
from tasks.train.settings import Correction, TrainSettings
from tests.engines.test_flops import architecture_of
from tests.once import once
from tests.stages import Forked, Result, Started, run_stage
from tests.train.steps import estimate_of, graded
from tests.train.test_slots import example
from tests.train.worlds import PARAMS, make_world, outputs

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]


def train(layout: Layout, *options: str) -> Result:
    """The command, in this process."""
    coordinates = ("--recipe", "r", "--seed", "0", *options)
    return run_stage("train", layout.root / "params.yaml", layout.root, *coordinates)


def start(layout: Layout) -> Started:
    """The command as a user starts it."""
    params = layout.root / "params.yaml"
    return Started("train", params, layout.root, "--recipe", "r", "--seed", "0")


def fork(layout: Layout) -> Forked:
    """The same without the seconds of its start, to be interrupted or killed."""
    params = layout.root / "params.yaml"
    return Forked("train", params, layout.root, "--recipe", "r", "--seed", "0")


@pytest.fixture(scope="module")
def finished(guesser: Path) -> Layout:
    """A run that nothing interrupted."""

    def make(folder: Path) -> None:
        process = train(make_world(folder, guesser, SIZES * 8))
        assert process.returncode == 0, process.output

    return Layout(once("finished", make))


@pytest.fixture(scope="module")
def step(qwen: Path) -> tuple[Any, Rollouts]:
    """A model, and a ragged step of its rollouts with invented rewards."""
    model = load_model(qwen, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(qwen)
    prompts = [tokenizer(text).input_ids for text in ("1+1 =", "Janet has 3", "2", "17 - 4 - 3 =")]
    counts = [4, 3, 4, 1]
    samples = HfEngine(model, [1], 64, 512).generate(
        Request(prompts, counts, list(range(12)), Sampling(1.0, 1.0, 0, 10, 0))
    )
    group_B = np.repeat(np.arange(4), counts)
    rewards = np.array([1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1.0])
    return model, graded(prompts, group_B, samples, rewards)


EXAMPLE_PROBE = dataclasses.asdict(probe.EXAMPLE)
ADVANTAGES = np.array([1.0, -1, -1, 1, 0, 0, 0, 1, 1, -1, -1, 0])
CORRECTION = Correction(ratio_to="old", level="token", cap=2.0, mode="truncate")
OBJECTIVE = Objective(
    clip.Method(clip.EXAMPLE),
    CORRECTION,
    1.0,
    None,
    0.0,
    share_prompts=False,
    tokens_per_chunk=10**6,
)


def gradient(
    model: Any,
    rollouts: Rollouts,
    rows: np.ndarray,
    max_tokens: int,
    objective: Objective = OBJECTIVE,
    max_shared_tokens: float = np.inf,
) -> torch.Tensor:
    totals = StepTotals(int(rollouts.completion_tokens_B().sum()), 12, 10)
    model.zero_grad(set_to_none=True)
    device, by_group = torch.device("cpu"), objective.share_prompts
    batches = micro_batches(
        rollouts,
        rows,
        max_tokens,
        device,
        by_group=by_group,
        max_shared_tokens=max_shared_tokens,
    )
    assert sorted(np.concatenate([batch.rows for batch in batches])) == sorted(rows)
    estimate = estimate_of(rollouts, ADVANTAGES)
    accumulate_gradients(
        model, batches, rollouts, estimate, objective, totals, architecture_of(model)
    )
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_gradient_does_not_depend_on_packing_order_or_skipping(step: tuple[Any, Rollouts]) -> None:
    model, rollouts = step
    rows = np.arange(12)
    whole = gradient(model, rollouts, rows, 10**6)
    assert whole.norm() > 1e-3
    for max_tokens in (1, 40, 100):
        np.testing.assert_allclose(gradient(model, rollouts, rows, max_tokens), whole, atol=1e-6)
    np.testing.assert_allclose(gradient(model, rollouts, rows[::-1].copy(), 60), whole, atol=1e-6)
    alive = np.array([0, 1, 2, 3, 7, 8, 9, 10])  # without the dead group and the group of one
    np.testing.assert_allclose(gradient(model, rollouts, alive, 60), whole, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 60, 10**6])
def test_prompts_read_once_give_the_same_gradient(
    step: tuple[Any, Rollouts], max_tokens: int
) -> None:
    model, rollouts = step
    whole = gradient(model, rollouts, np.arange(12), 10**6)
    shared = dataclasses.replace(OBJECTIVE, share_prompts=True)
    np.testing.assert_allclose(
        gradient(model, rollouts, np.arange(12), max_tokens, shared), whole, atol=1e-6
    )


@pytest.mark.parametrize("max_shared_tokens", [0, 16])
@pytest.mark.parametrize("max_biased_length", [4, 1024])
def test_long_rollouts_beside_shared_prompts_give_the_same_gradient(
    step: tuple[Any, Rollouts],
    max_shared_tokens: int,
    max_biased_length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rollouts = step
    whole = gradient(model, rollouts, np.arange(12), 10**6)
    monkeypatch.setattr(packing, "MAX_BIASED_LENGTH", max_biased_length)
    shared = dataclasses.replace(OBJECTIVE, share_prompts=True)
    is_long = rollouts.tokens_B() > max_shared_tokens
    assert is_long.all() == (max_shared_tokens == 0)
    assert is_long.any()
    for max_tokens in (1, 60, 10**6):
        found = gradient(model, rollouts, np.arange(12), max_tokens, shared, max_shared_tokens)
        np.testing.assert_allclose(found, whole, atol=1e-6)


def test_no_mask_is_as_large_as_a_long_rollout_squared(step: tuple[Any, Rollouts]) -> None:
    """A rollout of 16,000 tokens beside the others of its group."""
    rollouts = step[1]
    samples = Samples(
        [[5] * 16_000, *rollouts.samples.token_ids[1:]],
        [[0.0] * 16_000, *rollouts.samples.logprobs[1:]],
        rollouts.samples.finish_reasons,
    )
    long = dataclasses.replace(rollouts, samples=samples)
    batches = micro_batches(
        long, np.arange(12), 4096, torch.device("cpu"), by_group=True, max_shared_tokens=4096
    )
    assert [batch.rows.tolist() for batch in batches if batch.is_long] == [[0]]
    for window in (None, 4096):
        for block in (block for batch in batches for block in batch.shared[0].blocks):
            bias = block.bias(window, torch.float32)
            assert bias is None or bias.numel() <= 512 * (512 + 4096)


def test_a_micro_batch_leaves_no_mask_behind(step: tuple[Any, Rollouts]) -> None:
    model, rollouts = step
    batches = micro_batches(rollouts, np.arange(12), 40, torch.device("cpu"), by_group=True)
    shared = dataclasses.replace(OBJECTIVE, share_prompts=True)
    estimate, totals = estimate_of(rollouts, ADVANTAGES), StepTotals(99, 12, 10)
    accumulate_gradients(model, batches, rollouts, estimate, shared, totals, architecture_of(model))
    assert len(batches) > 1
    assert [batch.shared[0].biases for batch in batches] == [{}] * len(batches)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_chunked_logprobs_give_the_same_gradient(
    step: tuple[Any, Rollouts], share_prompts: bool
) -> None:
    model, rollouts = step
    whole = gradient(model, rollouts, np.arange(12), 10**6)
    chunked = dataclasses.replace(OBJECTIVE, share_prompts=share_prompts, tokens_per_chunk=7)
    np.testing.assert_allclose(
        gradient(model, rollouts, np.arange(12), 10**6, chunked), whole, atol=1e-6
    )


@pytest.mark.parametrize("share_prompts", [True, False])
def test_activation_checkpointing_gives_the_same_gradient(
    step: tuple[Any, Rollouts], share_prompts: bool
) -> None:
    model, rollouts = step
    whole = gradient(model, rollouts, np.arange(12), 60)
    thrifty = copy.deepcopy(model)
    enable_activation_checkpointing(thrifty)
    thrifty.train()
    objective = dataclasses.replace(OBJECTIVE, share_prompts=share_prompts)
    np.testing.assert_allclose(
        gradient(thrifty, rollouts, np.arange(12), 60, objective), whole, atol=1e-6
    )


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_bfloat16_gradient_points_where_the_float32_one_does(
    step: tuple[Any, Rollouts], share_prompts: bool
) -> None:
    """Under autocast queries and keys are float32 (rotated in it), values bfloat16, and layers are
    computed again."""
    model, rollouts = step
    whole = gradient(model, rollouts, np.arange(12), 60)
    coarse = copy.deepcopy(model)
    enable_activation_checkpointing(coarse)
    coarse.train()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient(
            coarse,
            rollouts,
            np.arange(12),
            60,
            dataclasses.replace(OBJECTIVE, share_prompts=share_prompts),
        )
    assert 0.99 < torch.nn.functional.cosine_similarity(found, whole, dim=0) < 1 - 1e-7


def test_kl_is_zero_at_the_reference_and_pulls_back_to_it(step: tuple[Any, Rollouts]) -> None:
    model, rollouts = step
    without = gradient(model, rollouts, np.arange(12), 60)
    reference = copy.deepcopy(model).requires_grad_(False)
    held = dataclasses.replace(OBJECTIVE, reference=reference, kl_coefficient=0.5)
    np.testing.assert_allclose(
        gradient(model, rollouts, np.arange(12), 60, held), without, atol=1e-6
    )
    scores = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-0.2, 0.5, 1.4, -2.0, 0.0], dtype=torch.float64).log_softmax(-1)
    sampler = torch.tensor([0.1, -0.8, 0.9, 0.0, -0.2], dtype=torch.float64).log_softmax(-1)
    mine = scores.log_softmax(-1)
    (true,) = torch.autograd.grad((mine.exp() * (mine - other)).sum(), scores, retain_graph=True)
    # for each token that the sampler may draw
    correction = dataclasses.replace(CORRECTION, cap=1e9)
    tokens, _ = corrected_tokens(
        mine, mine.detach(), sampler, mine.detach(), torch.arange(5), 5, correction
    )
    estimates = unbiased_kl(tokens, other)
    (expected,) = torch.autograd.grad((sampler.exp() * estimates).sum(), scores)
    np.testing.assert_allclose(expected, true, atol=1e-12)
    assert (sampler.exp() * estimates).sum().item() == pytest.approx(
        (mine.exp() * (mine - other)).sum().item()
    )
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = k3(logprobs, torch.tensor([-1.5]))
    np.testing.assert_allclose(kl.detach(), [np.exp(-0.5) + 0.5 - 1], atol=1e-6)
    kl.sum().backward()
    np.testing.assert_allclose(logprobs.grad, [1 - np.exp(-0.5)], atol=1e-6)


def test_kl_is_averaged_as_the_loss_is(step: tuple[Any, Rollouts]) -> None:
    """With `normalize: constant` a token of the KL term weighs what a token of the loss does: the
    gradients under two divisors differ by the ratio of the divisors."""
    model, rollouts = step
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    def pull(normalize: str) -> torch.Tensor:
        loss = clip.Method(dataclasses.replace(clip.EXAMPLE, normalize=normalize))
        objective = dataclasses.replace(OBJECTIVE, loss=loss)
        held = dataclasses.replace(objective, reference=reference, kl_coefficient=0.5)
        rows = np.arange(12)
        return gradient(model, rollouts, rows, 60, held) - gradient(
            model, rollouts, rows, 60, objective
        )

    by_token, constant = pull("token"), pull("constant")
    ratio = int(rollouts.completion_tokens_B().sum()) / (12 * 10)
    assert by_token.norm() > 1e-4
    np.testing.assert_allclose(constant, ratio * by_token, atol=1e-6)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_logprobs_of_micro_batches_are_the_samplers(
    step: tuple[Any, Rollouts], share_prompts: bool
) -> None:
    model, rollouts = step
    objective = dataclasses.replace(OBJECTIVE, share_prompts=share_prompts)
    for batch in micro_batches(
        rollouts, np.arange(12), 60, torch.device("cpu"), by_group=share_prompts
    ):
        with torch.no_grad():
            logprobs, entropy = token_logprobs(model, batch, objective)
        np.testing.assert_allclose(logprobs, batch.sampler_logprobs_N, atol=1e-4)
        assert len(entropy) == rollouts.completion_tokens_B()[batch.rows].sum()
        assert (entropy >= 0).all()


def test_a_head_that_does_more_is_refused(step: tuple[Any, Rollouts]) -> None:
    model = copy.deepcopy(step[0])
    check_forward(model, packed=False)
    model.config.logit_scale = 2.0  # as if its class did something else than its configuration says
    with pytest.raises(
        ArtifactError, match="Qwen3ForCausalLM computes something that is not supported"
    ):
        check_forward(model, packed=False)


def test_learning_rate_by_hand() -> None:
    plain = TrainSettings(learning_rate=1.0)
    assert learning_rate(plain, 0, 0.0) == 1.0
    assert learning_rate(dataclasses.replace(plain, warmup_steps=4), 1, 0.0) == 0.5
    assert learning_rate(TrainSettings(learning_rate=2.0), 9, 0.5) == pytest.approx(1.1)
    assert learning_rate(plain, 99, 1.0) == pytest.approx(0.1)
    # constant, then a decay over the last fifth
    late = TrainSettings(learning_rate=1.0, final_learning_rate_fraction=0.0, decay_share=0.2)
    rates = [learning_rate(late, 0, done) for done in (0.0, 0.5, 0.8, 0.9, 1.0)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])


def test_a_run_follows_its_plan_and_its_books_balance(finished: Layout) -> None:
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
    assert (steps["num_rollouts"] > 12).sum() <= 2  # the last of a phase takes its rest in
    assert (steps["num_rollouts"] < 18).all()
    assert (
        steps["log_ratio_max"].max() < 1e-3
    )  # the sampler held the trainer's weights at every step
    tokens = sum(row["prompt_tokens"] + len(row["token_ids"]) for row in out["rollouts"])
    ledger, policy = read_sealed(finished.train("r", 0) / "flops.json"), read_policy(finished)
    size = policy.architecture.num_matmul_parameters
    assert ledger["charged"]["total"] == pytest.approx(8 * size * tokens)
    assert ledger["charged_paper"]["total"] == pytest.approx(8 * size * tokens)
    assert ledger["tokens"]["generate"] == tokens
    assert (
        ledger["executed"]["update"] < ledger["charged"]["update"]
    )  # dead groups were not computed
    assert steps["flops_charged"][-1] == pytest.approx(ledger["charged"]["total"])
    curve = pl.DataFrame(out["curve"])
    assert (curve["step"][0], curve["step"][-1]) == (0, len(steps))
    # a point at the start, and the first step at which each tenth of the plan is done
    done = (steps["num_rollouts"].cum_sum() / plan["group_size"].sum()).to_list()
    tenths = [next(i for i, d in enumerate(done) if d >= n / 10 - 1e-9) + 1 for n in range(1, 11)]
    assert curve["step"].to_list() == sorted({0, *tenths})
    assert curve["flops_charged"].to_list()[1:] == [
        steps["flops_charged"][step - 1] for step in curve["step"].to_list()[1:]
    ]
    trained = finished.train("r", 0) / "policy"
    assert policy_digest(trained) != policy.digest
    assert (
        load_tokenizer(trained)("1+1").input_ids == load_tokenizer(policy.folder)("1+1").input_ids
    )
    assert list(finished.checkpoints.iterdir()) == []


@pytest.mark.slow
def test_killed_at_random_points_it_ends_as_if_it_had_not_been(
    finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    layout, rng = make_world(tmp_path, guesser, SIZES * 8), random.Random(1)
    kills = 0
    while kills < 3:
        before = set(layout.checkpoints.glob("*/step-*"))
        process = fork(layout)
        while set(layout.checkpoints.glob("*/step-*")) <= before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.25))
        process.kill()
        process.finish()
        assert process.returncode == -signal.SIGKILL, (
            "the run ended before it could be killed: make it longer"
        )
        kills += 1
    process = train(layout)
    assert process.returncode == 0, process.output
    assert "resumed after" in process.output
    assert outputs(layout) == outputs(finished)
    assert set(read_sealed(layout.train("r", 0) / "cost.json")["lost"]) == {
        "flops",
        "seconds",
        "tokens",
    }


@pytest.mark.slow
@pytest.mark.parametrize("control", ["sagc", "greso", "knapsack"])
def test_methods_that_remember_go_on_where_they_were(
    control: str, guesser: Path, tmp_path: Path
) -> None:
    slots = {
        "control": example(control_methods, control),
        "generate": {"method": "micro_groups", "cache_megabytes": 0.5, "order": "lpt"},
        "select": {"method": "pods", "keep": 3},
    }
    found = []
    for name in ("whole", "cut"):
        layout = make_world(tmp_path / name, guesser, SIZES * 4)
        values = {**PARAMS, "train": {**PARAMS["train"], **slots}}
        (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
        if name == "cut":
            process = fork(layout)
            while (
                max(
                    (int(path.name.split("-")[1]) for path in layout.checkpoints.glob("*/step-*")),
                    default=0,
                )
                < 3
            ):
                assert process.poll() is None  # what was learned by then is in the state
                time.sleep(0.005)
            process.kill()
            process.finish()
        run = train(layout)
        assert run.returncode == 0, run.output
        assert ("resumed after" in run.output) == (name == "cut")
        found.append(outputs(layout))
    assert found[0] == found[1]
    assert any(row["num_kept"] < row["num_rollouts"] for row in found[0]["steps"])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "command"), [(signal.SIGINT, fork), (signal.SIGTERM, start)])
def test_interrupted_it_checkpoints_and_says_so(
    number: int,
    command: Callable[[Layout], Forked | Started],
    finished: Layout,
    guesser: Path,
    tmp_path: Path,
) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 8)
    process = command(layout)
    while not list(layout.checkpoints.glob("*/step-*")):
        assert process.poll() is None, process.finish()
        time.sleep(0.01)
    process.send_signal(number)
    assert "run the same command again to go on" in process.finish()
    assert process.returncode == 130
    assert not layout.train("r", 0).exists()
    # a damaged newest checkpoint is passed over for the one before
    newest = max(layout.checkpoints.glob("*/step-*"))
    with (newest / "tensors.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    process = train(layout)
    assert f"passing over the damaged checkpoint {newest}" in process.output
    assert outputs(layout) == outputs(finished)


def test_another_parameter_is_another_key_and_says_what_changed(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    gaps = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
    values = {**PARAMS, "guards": {**PARAMS["guards"], "max_sampler_gap": gaps}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    process = train(layout)  # a gap of 0 is more than any sampler keeps
    assert process.returncode == 1
    assert "over guards.max_sampler_gap 0: " in process.output
    assert not layout.train("r", 0).exists()
    changed = {**PARAMS, "train": {**PARAMS["train"], "learning_rate": 2.0e-3}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(changed))
    process = train(layout)
    assert process.returncode == 0
    assert "starting over: train changed since the checkpoint" in process.output
    assert "1 of 12 visits have a group of one" in process.output


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float, guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    validation = {"num_samples": 1, "every_share": share}
    values = {**PARAMS, "train": {**PARAMS["train"], "validation": validation}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    process = train(layout)
    assert process.returncode == 1
    assert "above 0 and at most 1" in process.output


def test_truncated_sampling_is_refused(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    (layout.root / "params.yaml").write_text(
        yaml.safe_dump({**PARAMS, "sampling": {**PARAMS["sampling"], "top_p": 0.7}})
    )
    process = train(layout)
    assert process.returncode == 1
    assert "training needs sampling.temperature > 0, top_p 1.0" in process.output


def test_updates_recomputed_from_stored_rollouts_are_the_same(finished: Layout) -> None:
    stored = finished.train("r", 0) / "rollouts.parquet"
    process = train(finished, "--from-rollouts", str(stored))
    assert process.returncode == 0, process.output
    again = finished.replayed("r", 0)
    for name in ("policy/model.safetensors", "flops.json"):
        assert (again / name).read_bytes() == (finished.train("r", 0) / name).read_bytes()
    for name in ("steps", "rollouts", "curve"):
        assert pl.read_parquet(again / f"{name}.parquet").equals(
            pl.read_parquet(stored.parent / f"{name}.parquet")
        )


OBSERVED: dict[str, Any] = {
    "updates": {"epochs": 1, "minibatches": 2},
    "advantage": {**EXAMPLE_PROBE, "method": "value_probe"},
}
"""What makes ranks score the step's rollouts, and change the policy twice a batch."""

REPLAYED: dict[str, Any] = {"replay": {"method": "recent", "share": 0.3, "capacity": 4}}
TURNS: dict[str, Any] = {
    "branches": [0.6],
    "decay_share": 0.6,
    "generate": {
        "method": "multi_turn",
        "environment": {"name": "higher_lower", "higher": "+1", "lower": "1", "no_number": "2"},
        "max_turns": 2,
        "max_turn_tokens": 2,
    },
}
"""Conversations, whose masks ranks exchange, and a branch, whose trunk all of them go back to."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "shard"),
    [({}, "none"), (OBSERVED, "fsdp2"), (REPLAYED, "fsdp2"), (TURNS, "none")],
    ids=["plain", "observed", "replayed", "turns"],
)
def test_two_processes_take_the_same_steps_as_one(
    changes: dict[str, Any], shard: str, guesser: Path, tmp_path: Path
) -> None:
    """A few steps, before rounding lets the samples drift apart; ragged groups, one of them larger
    than the others."""
    values = {**PARAMS, "train": {**PARAMS["train"], "max_steps": 4, **changes}}
    worlds = [make_world(tmp_path / name, guesser, SIZES) for name in ("one", "two")]
    for layout, processes in zip(worlds, (1, 2), strict=True):
        engine = {**PARAMS["engine"], "num_processes": processes}
        learner = {**PARAMS["learner"], "shard": shard if processes == 2 else "none"}
        told = {**values, "engine": engine, "learner": learner}
        (layout.root / "params.yaml").write_text(yaml.safe_dump(told))
        process = start(layout)  # it becomes torchrun, or stays what it is
        log = process.finish()
        assert process.returncode == 0, log
    one, two = (outputs(layout) for layout in worlds)
    text = [
        [(row["step"], row["group"], row["token_ids"], row["reward"]) for row in o["rollouts"]]
        for o in (one, two)
    ]
    assert text[0] == text[1]
    branches = [row["branch"] for row in one["curve"] if row["branch"]]
    assert branches == [row["branch"] for row in two["curve"] if row["branch"]]
    assert branches == changes.get("branches", [])
    assert (
        one["flops"] == two["flops"]
        or json.loads(one["flops"])["charged"] == json.loads(two["flops"])["charged"]
    )
    for mine, theirs in zip(one["steps"], two["steps"], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "reward_mean",
            "num_mixed_groups",
            "flops_charged",
        ):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name
    models = [
        load_model(w.train("r", 0) / "policy", dtype=torch.float32, device=torch.device("cpu"))
        for w in worlds
    ]
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        np.testing.assert_allclose(first.detach(), second.detach(), atol=2e-5)


def test_steps_that_are_not_finite_are_skipped_and_then_stop_the_run(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 2)
    values = {**PARAMS, "train": {**PARAMS["train"], "learning_rate": 1.0e38}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    process = train(layout)
    log = process.output
    assert process.returncode == 1
    assert log.count("; the step is skipped") == 2
    assert "loss, gradient or log-probabilities are not finite; prompts: p" in log
    assert "that is guards.max_nonfinite_steps 3 in a row" in log


def test_resume_takes_a_checkpoint_that_fits_and_refuses_another(
    finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 8)
    process = fork(layout)
    while not list(layout.checkpoints.glob("*/step-*")):
        assert process.poll() is None, process.finish()
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.finish()
    oldest = min(layout.checkpoints.glob("*/step-*"))
    values = {**PARAMS, "train": {**PARAMS["train"], "weight_decay": 0.1}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    process = train(layout, "--resume", str(oldest))
    assert process.returncode == 1
    assert "does not fit this run: train differ" in process.output
    (layout.root / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    process = train(layout, "--resume", str(oldest))
    assert f"resumed after {int(oldest.name.split('-')[1])} steps" in process.output
    assert outputs(layout) == outputs(finished)


@pytest.mark.parametrize("which", [min, max])
def test_damaged_files_beside_the_checkpoints_cost_work_and_nothing_else(
    which: Callable[[list[str]], str], finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    """The oldest part of the rollouts is in all checkpoints, the newest in the last alone."""
    layout = make_world(tmp_path, guesser, SIZES * 8)
    process = fork(layout)
    while len(list(layout.checkpoints.glob("*/rollouts-*"))) < 4:
        assert process.poll() is None, process.finish()
        time.sleep(0.005)
    process.kill()
    process.finish()
    (folder,) = layout.checkpoints.iterdir()
    newest = read_sealed(max(folder.glob("step-*")) / "state.json")
    (folder / which(newest["parts"])).write_bytes(b"PAR1")
    with (folder / "work.json").open("a") as file:
        file.write("{")
    process = train(layout)
    log = process.output
    assert process.returncode == 0, log
    assert "is not what was written" in log
    assert outputs(layout) == outputs(finished)


def test_recorded_rollouts_are_never_taken_for_those_of_other_prompts(
    finished: Layout, guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 8)
    stored = TRAIN_ROLLOUTS.read(finished.train("r", 0) / "rollouts.parquet")
    others = stored.with_columns(prompt_id=pl.lit("p5"))  # as many rollouts, but of another prompt
    TRAIN_ROLLOUTS.write(tmp_path / "others.parquet", others)
    process = train(layout, "--from-rollouts", str(tmp_path / "others.parquet"))
    assert process.returncode == 1
    assert "step 0: the record has (prompt, rollouts) [('p5'" in process.output
    assert "it is the record of another run" in process.output


def test_method_settings_are_checked_by_value(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    loss = {**PARAMS["train"]["loss"], "normalize": "tokens"}
    (layout.root / "params.yaml").write_text(
        yaml.safe_dump({**PARAMS, "train": {**PARAMS["train"], "loss": loss}})
    )
    process = train(layout)
    assert process.returncode == 1
    assert "train.loss.normalize is 'tokens'; allowed: token, " in process.output
