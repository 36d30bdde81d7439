"""The update of a step: the computed and charged rollouts, its averages, and several updates per
batch."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.common import params, recipes
from tasks.common.accounting.ledger import charged_flops
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.learner.learner import Learner
from tasks.train.loading import settings_of
from tasks.train.loop.loop import learn
from tasks.train.methods.advantage import mc_grpo, one_sided
from tasks.train.methods.loss import clip
from tasks.train.methods.shape import cppo, kondo, nat, pruned_po
from tasks.train.needs import num_scorings
from tests.train.steps import estimated, rollouts_of
from tests.train.worlds import make_trainer, make_world, run_steps, same_parameters, sampled


@pytest.mark.parametrize(
    ("module", "size", "changes"),
    [
        (one_sided, 8, {"advantage": {"method": "one_sided", "update_cost": 3.0}}),
        (mc_grpo, 9, {"advantage": {"method": "mc_grpo"}}),
        (cppo, 8, {"shape": [{"method": "cppo", "drop": 0.75}]}),
        (pruned_po, 8, {"shape": [{"method": "pruned_po", "drop": 0.75}]}),
        (kondo, 8, {"shape": [{"method": "kondo", "keep": 0.1}]}),
    ],
)
def test_rollouts_of_weight_0_are_not_charged_and_have_no_effect(
    module: ModuleType,
    size: int,
    changes: dict[str, Any],
    guesser: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_world(tmp_path, guesser, [size] * 24)
    skipping = make_trainer(layout, **changes)
    run_steps(skipping, 5)
    monkeypatch.setattr(module.Method, "skips_zeros", False)
    keeping = make_trainer(layout, **changes)
    run_steps(keeping, 5)
    rows = pl.concat(skipping.state.rollouts)
    assert rows.filter(pl.col("kept") != (pl.col("advantage") != 0)).is_empty()
    mixed = size * sum(row["num_mixed_groups"] for row in skipping.state.steps)
    assert 0 < rows["kept"].sum() < mixed
    tokens = rows.filter("kept").select(pl.col("prompt_tokens") + pl.col("token_ids").list.len())
    assert skipping.state.ledger.tokens["update"] == tokens.sum().item()
    assert keeping.state.ledger.rollouts["update"] == len(rows)
    assert same_parameters(skipping.learner.model, keeping.learner.model)


def test_tokens_after_a_cut_are_not_computed_and_have_no_effect(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient equals that of whole completions whose last advantages are 0."""
    layout, shape = make_world(tmp_path, guesser, [4] * 24), [{"method": "nat", "whole": 0.25}]
    cutting = make_trainer(layout, shape=shape)
    mine_S = run_steps(cutting, 4)
    monkeypatch.setattr(nat.Method, "cuts_rows", False)
    whole = make_trainer(layout, shape=shape)
    theirs_S = run_steps(whole, 4)
    for name in ("loss", "grad_norm"):  # Adam's step hardly depends on the size of a gradient
        found = [row[name] for row in mine_S if row["updated"]]
        assert found == pytest.approx([row[name] for row in theirs_S if row["updated"]], rel=1e-4)
    assert pl.concat(whole.state.rollouts)["text"].str.len_chars().max() > 1
    for mine, theirs in zip(
        whole.learner.model.parameters(), cutting.learner.model.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    ours, others = cutting.state.ledger, whole.state.ledger
    assert ours.rollouts == others.rollouts
    for name in ("executed", "charged", "charged_mixed", "tokens"):
        mine, theirs = getattr(ours, name), getattr(others, name)
        assert 0 < mine["update"] < theirs["update"]
        assert mine["generate"] == theirs["generate"]


def test_a_rollout_ends_with_its_last_advantage() -> None:
    old = [[0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    rollouts = rollouts_of([0.0] * 3, [0, 0, 1], [3, 2, 4]).with_columns(old_logprobs=old)
    advantages_N = np.array([0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 3.0])
    estimate = rollouts.estimated(np.ones(3, dtype=np.bool_), advantages_N)
    short = estimate.without_tails()
    assert short.completion_tokens_B().tolist() == [2, 1, 4]
    assert short.advantages_N.tolist() == [0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 3.0]
    assert short.old_logprobs_N is not None
    assert short.old_logprobs_N.tolist() == [0.0, 1.0, 3.0, 5.0, 6.0, 7.0, 8.0]
    assert short.logprobs_N.shape == short.versions_N().shape == short.trained_N().shape == (7,)


def test_a_kl_term_or_bonus_computes_and_charges_all_kept_rollouts(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, [3] * 24)
    pods = {"select": {"method": "pods", "keep": 2}, "batch": {"size": 24}}
    bonus = {"loss": {"method": "clip", "entropy": {"coefficient": 0.01}}}
    for changes in ({}, {"kl_coefficient": 0.1}, bonus):
        trainer = make_trainer(layout, **pods, **changes)
        batch = sampled(trainer)
        rng = trainer.rng()
        estimated = trainer.estimate(batch.fresh, rng)
        learn(trainer, batch)
        tokens_B = batch.fresh.tokens_B()
        kept_B, weighs_B = estimated.kept_B, estimated.has_advantage_B()
        assert 0 < tokens_B[weighs_B].sum() < tokens_B[kept_B].sum() < tokens_B.sum()
        updated = tokens_B[kept_B if changes else weighs_B].sum()
        ledger, architecture = trainer.state.ledger, trainer.run.policy.architecture
        charged = charged_flops(architecture, updated=float(updated))
        assert ledger.charged_mixed["update"] == charged
        # prompts are computed once per group
        whole = charged_flops(architecture, updated=float(tokens_B[kept_B].sum()))
        assert ledger.charged["update"] == whole
        assert 0.3 * charged < ledger.executed["update"] < charged


@pytest.mark.parametrize("divisor", ["generated", "kept"])
def test_all_groups_with_graded_tokens_have_the_same_weight(
    divisor: str, guesser: Path, tmp_path: Path
) -> None:
    """Groups have 2, 3, 4 and 1 rollouts; the last group and one of the third are not graded, and
    one of the second is not kept."""
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6), divisor=divisor)
    lengths, errors = [3, 1, 2, 2, 5, 4, 1, 1, 6, 2], [6, 9]
    rollouts = rollouts_of([0.0] * 10, [0, 0, 1, 1, 1, 2, 2, 2, 2, 3], lengths)
    outcomes = ["error" if row in errors else "wrong" for row in range(10)]
    kept = np.array([outcome == "wrong" for outcome in outcomes])
    kept[4] = False
    rollouts = rollouts.with_columns(outcome=outcomes, kept=kept)
    totals = trainer.learner.totals(rollouts)
    assert totals.divisor_Q is not None
    second = 4 if divisor == "kept" else 9
    assert totals.divisor_Q.tolist() == [3 * 4, 3 * second, 3 * 11, 0]
    assert totals.num_tokens == 4 + second + 11


@pytest.mark.parametrize("name", ["dapo", "dapo_full"])
def test_dapo_divides_by_mixed_groups_alone(name: str, guesser: Path, tmp_path: Path) -> None:
    """One group of four has both outcomes: a quarter of the tokens."""
    layout = make_world(tmp_path, guesser, [2] * 4)
    trainer = make_trainer(layout, **params.load(recipes.files()[name])["train"])
    rollouts = rollouts_of([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2, 3, 3])
    found = trainer.estimate(rollouts, trainer.rng())
    totals = trainer.learner.totals(found)
    assert (totals.num_tokens, totals.num_rollouts) == (2, 2)
    assert found.advantages_N.tolist() == [0, 0, 1, -1, 0, 0, 0, 0]


def test_averages_over_prompts_and_tokens_agree_for_groups_of_one_length(
    guesser: Path, tmp_path: Path
) -> None:
    """Otherwise they differ, and the gradient does not depend on micro-batches."""

    def gradient(normalize: str, groups: list[int], most: int) -> torch.Tensor:
        trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6))
        trainer.learner.memory = dataclasses.replace(
            trainer.learner.memory, max_tokens_per_micro_batch=most
        )
        loss = clip.Method(clip.Settings(normalize=normalize))
        rollouts = rollouts_of([0.0] * 6, groups, [2, 4, 3, 3, 1, 5])
        signs = np.array([1.0, -2.0, 1.5, -1.0, 2.0, -0.5])
        trainer.learner.compute_gradient(estimated(rollouts, signs), loss)
        return torch.cat([p.grad.flatten() for p in trainer.learner.model.parameters()])

    even, uneven = [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2]
    torch.testing.assert_close(gradient("prompt", even, 64), gradient("token", even, 64))
    found = gradient("prompt", uneven, 64)
    assert (found - gradient("token", uneven, 64)).norm() > 1e-2 * found.norm()
    torch.testing.assert_close(gradient("prompt", uneven, 1), found, rtol=1e-4, atol=1e-6)


def logprobs_of(model: torch.nn.Module, rollouts: Rollouts, row: int) -> torch.Tensor:
    """[T, V] Return the log-probabilities of a completion's positions, by a separate forward."""
    prompt, ids = rollouts.table["prompt", "token_ids"].row(row)
    logits: torch.Tensor = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def check_gradient(learner: Learner, coefficient: float, terms: list[Any], normalize: str) -> None:
    """Check by plain autograd that the gradient is that of the mean of these terms of tokens: one
    tensor per rollout, equally many rollouts in each of three groups."""
    size = len(terms) // 3
    groups = [torch.cat(terms[first : first + size]) for first in range(0, 3 * size, size)]
    mean = {
        "token": torch.cat(terms).mean(),
        "sequence": torch.stack([term.mean() for term in terms]).mean(),
        "constant": torch.cat(terms).sum() / (len(terms) * 8),
        "prompt": torch.stack([group.mean() for group in groups]).mean(),
    }[normalize]
    found = [parameter.grad.clone() for parameter in learner.model.parameters()]
    expected = torch.autograd.grad(coefficient * mean, [*learner.model.parameters()])
    assert max(float(part.abs().max()) for part in expected) > 1e-3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant", "prompt"])
@pytest.mark.parametrize("divisor", ["generated", "kept"])
@pytest.mark.parametrize(("keep", "epochs"), [(2, 1), (4, 1), (2, 2)])
def test_the_kl_term_is_the_mean_over_kept_rollouts(
    keep: int, epochs: int, divisor: str, normalize: str, guesser: Path, tmp_path: Path
) -> None:
    """For several epochs the reference has scored the rollouts before."""
    loss = {"method": "clip", "normalize": normalize}
    changes = {"kl_coefficient": 0.5, "max_grad_norm": 1e9, "divisor": divisor, "loss": loss}
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6), **changes)
    batch, learner = sampled(trainer), trainer.learner
    assert learner.reference is not None
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in learner.reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    keep_B = np.arange(12) % 4 < keep
    rollouts = batch.fresh.estimated(keep_B, np.zeros(len(batch.fresh.owner_N())))
    if epochs > 1:
        observed, _ = learner.score(rollouts, Features(), trainer.slots.loss)
        rollouts = dataclasses.replace(rollouts, observed=observed)
        rollouts, _ = learner.score_reference(rollouts, trainer.slots.loss)
    learner.compute_gradient(rollouts, trainer.slots.loss)
    terms = []
    for row in np.flatnonzero(keep_B).tolist():
        ids = torch.tensor(rollouts.table["token_ids"].to_list()[row])[:, None]
        mine, theirs = (
            logprobs_of(model, rollouts, row).gather(-1, ids)[:, 0]
            for model in (learner.model, learner.reference)
        )
        gap = theirs.detach() - mine
        # the gradient of the ratio to the sampler, which is the policy itself
        terms.append((mine - mine.detach()).exp() * (gap.exp() - gap - 1.0))
    check_gradient(learner, 0.5, terms, normalize)


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
@pytest.mark.parametrize("chunk", [3, 4096])
def test_the_entropy_bonus_is_the_mean_over_kept_rollouts(
    chunk: int, normalize: str, guesser: Path, tmp_path: Path
) -> None:
    loss = {"method": "clip", "normalize": normalize, "entropy": {"coefficient": 0.5}}
    layout = make_world(tmp_path, guesser, [4] * 6)
    trainer = make_trainer(layout, max_grad_norm=1e9, loss=loss)
    batch, learner = sampled(trainer), trainer.learner
    learner.memory = dataclasses.replace(learner.memory, tokens_per_logprob_chunk=chunk)
    keep_B = np.arange(12) % 4 < 3
    rollouts = batch.fresh.estimated(keep_B, np.zeros(len(batch.fresh.owner_N())))
    learner.compute_gradient(rollouts, trainer.slots.loss)
    logprobs = [
        logprobs_of(learner.model, rollouts, row) for row in np.flatnonzero(keep_B).tolist()
    ]
    check_gradient(learner, -0.5, [-(each.exp() * each).sum(-1) for each in logprobs], normalize)


def test_several_updates_start_from_the_scored_policy(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4] * 24)
    updates = {"epochs": 2, "minibatches": 3}
    trainer = make_trainer(layout, updates=updates, learning_rate=1e-2)
    row = run_steps(trainer, 1)[-1]
    assert 2 <= row["num_updates"] <= 6
    assert trainer.learner.version == row["num_updates"]
    ledger = trainer.state.ledger
    assert ledger.charged["score"] > 0
    assert ledger.executed["score"] > 0
    (rows,) = trainer.state.rollouts
    tokens = rows["prompt_tokens"].sum() + rows["token_ids"].list.len().sum()
    assert ledger.tokens["update"] == 2 * tokens
    updated = charged_flops(trainer.run.policy.architecture, updated=tokens)
    assert ledger.charged["update"] == 2 * updated
    # later updates of the batch differ from the old policy, so PPO's clip has an effect
    assert row["clip_rate"] > 0


def test_several_updates_need_no_pass_with_ratios_to_the_sampler(
    guesser: Path, tmp_path: Path
) -> None:
    """In float32 the sampler's log-probabilities equal those of the scored policy."""
    layout = make_world(tmp_path, guesser, [4] * 24)
    found = []
    for ratio_to in ("old", "sampler"):
        changes: dict[str, Any] = {"updates": {"epochs": 2, "minibatches": 3}}
        changes |= {"correction": {"ratio_to": ratio_to}, "learning_rate": 1e-2}
        trainer = make_trainer(layout, **changes)
        rows = run_steps(trainer, 2)
        weights = [part.detach() for part in trainer.learner.model.parameters()]
        assert trainer.state.ledger.executed["score"] == 0 or ratio_to == "old"
        assert trainer.state.ledger.charged["score"] == 0 or ratio_to == "old"
        assert num_scorings(settings_of(changes)) == (ratio_to == "old")
        found.append((weights, [row["clip_rate"] for row in rows]))
    (scored, first), (plain, second) = found
    assert max(first) > 0
    assert second == pytest.approx(first, abs=0.02)
    for mine, theirs in zip(plain, scored, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ratio_to", ["old", "sampler"])
def test_the_reference_reads_rollouts_once_for_all_epochs(
    ratio_to: str, guesser: Path, tmp_path: Path
) -> None:
    correction = {"ratio_to": ratio_to}
    layout = make_world(tmp_path, guesser, [4] * 6)
    executed, charged = [], []
    for epochs in (1, 3):
        updates = {"epochs": epochs, "minibatches": 2}
        changes = {"kl_coefficient": 0.1, "updates": updates, "correction": correction}
        trainer = make_trainer(layout, **changes)
        run_steps(trainer, 1)
        executed.append(trainer.state.ledger.executed["score"])
        charged.append(trainer.state.ledger.charged["score"])
    # the micro-batches and their padding differ
    assert executed[0] == pytest.approx(executed[1], rel=0.02)
    assert charged[0] == charged[1] > 0
