"""Stored successes that join fresh groups of partly solved prompts (ExGRPO)."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.common.accounting.ledger import charged_flops
from tasks.common.accounting.spending import CellBudget
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Observed, Rollouts, StepTotals
from tasks.train.methods.control import experience
from tasks.train.methods.loss import shaped
from tasks.train.methods.replay import successes
from tasks.train.settings import BatchSettings
from tests.train.steps import answer_to, passes_of, play, requested, rollouts_of, tokens_of
from tests.train.test_slots import refuse_to_score
from tests.train.worlds import make_trainer, make_world, run, sampled

SIZES = [4, 2, 6] * 12
CHANGES: dict[str, Any] = {
    "control": {"method": "experience", "share": 0.5, "start": 0.0},
    "replay": {"method": "successes", "per_prompt": 2, "capacity": 4},
    "advantage": {"method": "dr_grpo"},
    "loss": {"method": "shaped"},
    "learning_rate": 2e-3,
}


# --- the control


def control_of(num_prompts: int, size: int, batch: int, **settings: Any) -> experience.Method:
    """Return the control on a plan of two passes with groups of one size."""
    groups = passes_of(num_prompts, size, 2, BatchSettings("rollouts", batch, "generated"))
    return experience.Method(experience.Settings(**settings), groups)


def test_buckets_near_one_half_are_drawn_most() -> None:
    """The density is normal around 4 of 8; prompts of a bucket share it."""
    found = np.exp(experience.log_weights(np.arange(1, 8), np.full(7, 8)))
    expected = [0.0044, 0.0540, 0.2420, 0.3991, 0.2420, 0.0540, 0.0044]
    assert found / found.sum() == pytest.approx(expected, abs=5e-5)
    shared = experience.log_weights(np.array([3, 3, 4]), np.full(3, 8))
    assert shared[0] == shared[1] == pytest.approx(np.log(found[2] / 2))
    assert np.diff(experience.log_weights(np.array([1, 2]), np.full(2, 128))) == [62.5]


def test_prompts_are_drawn_in_proportion_to_the_weights_of_buckets() -> None:
    """There are seven prompts, one per bucket, and one is drawn at a time."""
    method = control_of(16, 8, 16, share=0.5, start=0.0)
    method.state.correct[:7], method.state.sizes[:7] = np.arange(1, 8), 8
    method.state.has_started = True
    visits = np.array([14, 15])
    rng = np.random.default_rng(0)
    drawn = [int(method.again(visits, rng)[0]) for _ in range(4000)]
    expected = np.exp(experience.log_weights(np.arange(1, 8), np.full(7, 8)))
    found = np.bincount(drawn, minlength=7) / 4000
    assert found == pytest.approx(expected / expected.sum(), abs=0.02)


def test_partly_solved_prompts_are_sampled_again_with_one_rollout_less() -> None:
    method, rng = control_of(8, 4, 16, share=0.5, start=0.35), np.random.default_rng(0)
    first = requested(method, rng)
    assert (first.prompt_rows.tolist(), first.counts.tolist()) == ([0, 1, 2, 3], [4] * 4)
    assert first.joined is not None
    assert not first.joined.any()
    # prompt 0 is partly solved, 1 is solved, 2 is not, 3 has one graded rollout, which is wrong
    rewards = [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    method.observe(answer_to(first, rewards, errors=3))
    second = requested(method, rng)
    assert second.prompt_rows.tolist() == [4, 5, 6, 0]
    assert second.counts.tolist() == [4, 4, 4, 3]
    assert second.joined is not None
    assert second.joined.tolist() == [False, False, False, True]
    assert method.describe() == {"open_rate": 1 / 8, "retired_rate": 1 / 8}
    method.observe(answer_to(second, [0] * 12 + [1] * 3))  # prompt 0 is solved, and retired
    assert method.describe() == {"open_rate": 0.0, "retired_rate": 2 / 8}
    third = requested(method, rng)
    assert third.prompt_rows.tolist() == [7]  # the end of a pass
    method.observe(answer_to(third, [1, 0, 0, 0]))
    last = requested(method, rng)
    assert last.prompt_rows.tolist() == [0, 1, 2, 7]
    method.observe(answer_to(last, [1, 0, 0, 0] * 3 + [0] * 3))
    assert method.describe() == {"open_rate": 1 / 8, "retired_rate": 2 / 8}  # they stay retired
    method.observe(rollouts_of([1, 1, 1, 0], [0, 0, 1, 1], prompt_rows=[2, 2]))
    assert method.describe() == {"open_rate": 0.0, "retired_rate": 3 / 8}  # also within a step


def test_experience_starts_after_a_step_with_enough_successes() -> None:
    for correct, has_started in ((2, False), (3, True)):  # of 8: 0.25 and 0.375
        method, rng = control_of(8, 4, 8, start=0.35), np.random.default_rng(0)
        request = requested(method, rng)
        method.observe(answer_to(request, [1, 0, 0, 0, *[1] * (correct - 1), *[0] * (5 - correct)]))
        request = requested(method, rng)
        assert request.joined is not None
        assert request.joined.any() == has_started
        method.observe(answer_to(request))  # a step without successes does not stop it
        assert method.state.has_started == has_started


def test_experience_spends_the_rollouts_of_the_plan() -> None:
    """Groups have 4 and 3 rollouts; the last group is cut."""
    method, rng = control_of(6, 4, 12, start=0.0), np.random.default_rng(0)
    total, steps = 0, 0
    while step := play(method, rng, lambda row: float(row % 2)):
        rollouts = step[1].with_columns(outcome="wrong")
        is_first_B = np.diff(step[1].group_B, prepend=-1) > 0
        outcomes = np.where(is_first_B, "correct", "wrong").tolist()
        method.observe(rollouts.with_columns(outcome=outcomes))
        total, steps = total + len(rollouts.group_B), steps + 1
    assert total == 48
    assert steps > 4
    assert method.progress() == 1.0


# --- the replay


def completions(rewards: list[float], groups: list[int], rows: list[int], tokens: list[int]) -> Any:
    """Return rollouts of one token each."""
    made = rollouts_of(rewards, groups, prompt_rows=rows)
    return made.with_columns(token_ids=[[token] for token in tokens], text="7")


def entropy_of_tokens(rollouts: Rollouts) -> Observed:
    """Return an observation whose entropies are the token ids."""
    tokens = rollouts.table["token_ids"].explode().to_numpy().astype(float)
    return Observed(np.zeros_like(tokens), tokens)


def stored(method: successes.Method) -> list[tuple[int, int]]:
    rows = method.state.table.select("prompt_row", pl.col("token_ids").list.first()).rows()
    return [(int(row), int(token)) for row, token in rows]


def test_successes_of_partly_solved_groups_are_stored() -> None:
    method = successes.Method(successes.Settings(per_prompt=2, capacity=2))
    method.add(completions([1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2], [5, 6, 7], [1, 2, 3, 4, 5, 6]))
    assert stored(method) == [(5, 1)]  # 6 is solved, 7 is not
    method.add(completions([1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1], [5, 8], [7, 8, 9, 0, 10, 0]))
    assert stored(method) == [(5, 8), (5, 9), (8, 10)]  # the latest two
    assert method.state.table["replayed"].all()
    assert method.state.table["text"].unique().to_list() == [""]
    method.add(completions([1, 0], [0, 0], [9], [11, 0]))
    assert stored(method) == [(8, 10), (9, 11)]  # the oldest prompt leaves
    method.add(completions([1, 1], [0, 0], [8], [12, 13]))
    assert stored(method) == [(9, 11)]  # its prompt was solved
    failed = completions([0, 0], [0, 0], [9], [0, 0])
    method.add(failed.with_columns(outcome="error"))
    method.add(failed)
    assert stored(method) == [(9, 11)]


def test_the_success_with_the_lowest_entropy_joins() -> None:
    method = successes.Method(successes.Settings(per_prompt=3, capacity=9))
    method.add(completions([1, 1, 0, 1, 0], [0, 0, 0, 1, 1], [5, 8], [4, 3, 0, 9, 0]))
    found = method.join(np.array([8, 7, 5]), entropy_of_tokens)
    assert found.group_B.tolist() == [0, 2]
    assert found.table["token_ids"].to_list() == [[9], [3]]
    assert found.prompt_rows_Q.tolist() == [8, 7, 5]
    alone = method.join(np.array([7, 8]), refuse_to_score)  # there is only one candidate
    assert alone.group_B.tolist() == [1]
    nothing = method.join(np.array([1]), refuse_to_score)
    assert len(nothing.group_B) == 0


# --- the loss


RATIOS = [0.1, 0.5, 1.0, 2.0, 5.0]


def gradients(settings: shaped.Settings, marked: list[bool], ratio_to_old: float = 1.0) -> Floats:
    """Return the coefficient of A grad log pi at each ratio of policy to sampler."""
    logs = torch.full((5,), ratio_to_old, dtype=torch.float64).log().requires_grad_()
    sampler_N = logs.detach() - torch.tensor(RATIOS, dtype=torch.float64).log()
    marked_N = torch.tensor(marked) if settings.shaping is not None else None
    seen: dict[str, Any] = {"sampler_logprobs_N": sampler_N, "marked_N": marked_N}
    tokens = tokens_of(logs, -3.0, weights_N=torch.full_like(sampler_N, 2.0), **seen)
    loss, _ = shaped.Method(settings)(tokens, StepTotals(1, 1, 1))
    loss.backward()
    assert logs.grad is not None
    return np.asarray(logs.grad / 3.0)


def test_rare_replayed_tokens_have_the_largest_weights() -> None:
    """The published table of w / (w + .1); fresh tokens have the ratio times the weight."""
    settings = shaped.Settings(normalize="token")
    expected = [0.25, 0.1389, 0.0826, 0.0454, 0.0192]
    assert gradients(settings, [True] * 5) == pytest.approx(expected, abs=5e-5)
    mixed = gradients(settings, [True, False, True, False, True], 1.5)
    assert mixed == pytest.approx([0.25, 3.0, 0.0826, 3.0, 0.0192], abs=5e-5)
    plain = shaped.Settings(shaping=None, normalize="token")
    assert gradients(plain, [True] * 5, 1.5) == pytest.approx([3.0] * 5)


def test_the_shaped_ratio_and_its_gradient_are_finite() -> None:
    logs = torch.tensor([0.1, 1.0, 5.0]).log().tolist() + [300.0, -300.0]
    for log, value in zip(logs, [0.5, 0.9091, 0.9804, 1.0, 0.0], strict=True):
        policy_N = torch.tensor([log]).requires_grad_()
        seen = {"marked_N": torch.tensor([True]), "sampler_logprobs_N": torch.zeros(1)}
        tokens = tokens_of(policy_N, old=policy_N.detach(), **seen)
        loss, _ = shaped.Method(shaped.Settings(normalize="token"))(tokens, StepTotals(1, 1, 1))
        loss.backward()
        assert -loss.item() == pytest.approx(value, abs=5e-5)
        assert policy_N.grad is not None
        assert torch.isfinite(policy_N.grad).all()


# --- in the loop


def test_stored_successes_join_their_groups_and_are_charged(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    trainer = run(layout, CHANGES)
    rows = pl.read_parquet(layout.train("r", 0) / "rollouts.parquet")
    joined = rows.filter("replayed")
    assert len(joined) >= 3
    assert (joined["outcome"] == "correct").all()
    groups = rows.group_by("step", "group").agg(
        pl.col("replayed").sum(), pl.len(), pl.col("prompt_id").n_unique(), pl.last("sample_index")
    )
    assert groups["replayed"].max() == 1
    assert groups["prompt_id"].max() == 1
    assert (groups["sample_index"] == groups["len"] - 1).all()
    versions = rows.filter(~pl.col("replayed")).group_by("step").agg(newest=pl.max("version"))
    assert (
        (joined.join(versions, on="step").select(pl.col("version") < pl.col("newest")))
        .to_series()
        .all()
    )
    ledger = trainer.state.ledger
    assert ledger.rollouts["generate"] == len(rows) - len(joined) == sum(SIZES)
    assert ledger.charged["score"] > 0.0
    assert ledger.executed["score"] > 0.0


def test_a_pass_over_stored_rollouts_by_hand(guesser: Path, tmp_path: Path) -> None:
    """There are two stored completions of one token."""
    layout = make_world(tmp_path, guesser, SIZES)
    CellBudget("charged", 1e99, 0.0).write(layout.plan("r", 0) / "budget.json")
    trainer = make_trainer(layout, **CHANGES)
    batch = sampled(trainer)
    (prompt,) = trainer.prompts.token_ids(batch.fresh.prompt_rows_Q[1:2])
    rollouts = completions([1, 1, 0], [0, 0, 0], batch.fresh.prompt_rows_Q[1:2].tolist(), [9, 8, 7])
    trainer.slots.replay.add(rollouts.with_columns(prompt=[prompt] * 3))
    batch.joined = [1]
    found = trainer.joined(batch.fresh, batch.joined)
    assert found.sizes_Q().tolist() == (batch.fresh.sizes_Q() + np.eye(3, dtype=int)[1]).tolist()
    assert np.flatnonzero(found.replayed_B).tolist() == [int(found.sizes_Q()[:2].sum()) - 1]
    architecture = trainer.run.policy.architecture
    expected = charged_flops(architecture, reference=2.0 * (len(prompt) + 1))
    assert trainer.state.ledger.charged["score"] == trainer.budget.passes == expected
