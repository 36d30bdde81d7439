"""The norm of the gradient of every rollout, and tokens that the policy did not write."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.train.rollouts import Features
from tests.train.worlds import make_trainer, make_world, sampled

BATCH = {"unit": "rollouts", "size": 12, "counts": "generated"}


def test_tokens_of_an_environment_carry_no_gradient(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4] * 6)
    trainer = make_trainer(layout, batch=BATCH)
    batch = sampled(trainer)
    assert batch is not None
    rollouts = batch.fresh
    num_tokens = len(rollouts.owner_N())
    own_N = np.arange(num_tokens) % 2 == 0
    ends_B = np.cumsum(rollouts.completion_tokens_B())
    masked = rollouts.with_columns(is_action=np.split(own_N, ends_B)[:-1])
    keep_B = np.ones(len(rollouts.group_B), dtype=np.bool_)
    advantages_N = np.random.default_rng(0).standard_normal(num_tokens)

    def gradient(rows: Any, advantages: Any) -> torch.Tensor:
        trainer.learner.compute_gradient(rows.estimated(keep_B, advantages), trainer.slots.loss)
        grads = [p.grad.flatten() for p in trainer.learner.model.parameters() if p.grad is not None]
        return torch.cat(grads).clone()

    advantages_N = np.where(own_N, advantages_N, 0.0)
    found = gradient(masked, advantages_N)
    # the same tokens with advantage 0 in the whole: another divisor, the same direction
    whole = gradient(rollouts, advantages_N)
    cosine = torch.nn.functional.cosine_similarity(found, whole, dim=0)
    assert cosine.item() == pytest.approx(1.0, abs=2e-4)
    assert trainer.learner.totals(masked).num_tokens == own_N.sum()


def test_gradient_norms_are_of_one_rollout_each(guesser: Path, tmp_path: Path) -> None:
    """The norm that autograd finds for the rollout by itself, whatever shares its group."""
    layout = make_world(tmp_path, guesser, [4] * 6)
    trainer = make_trainer(layout, batch=BATCH)
    batch = sampled(trainer)
    assert batch is not None
    wanted = Features(gradient_norms=True)
    seen, _ = trainer.learner.observe(batch.fresh, wanted, trainer.slots.loss)
    assert seen.gradient_norms_B is not None
    for row in (0, 5, 11):
        alone = batch.fresh.take(np.array([row]))
        one, _ = trainer.learner.observe(alone, wanted, trainer.slots.loss)
        assert one.gradient_norms_B == pytest.approx(seen.gradient_norms_B[row : row + 1], rel=1e-4)
    plain, _ = trainer.learner.observe(batch.fresh, Features(), trainer.slots.loss)
    np.testing.assert_allclose(seen.logprobs_N, plain.logprobs_N, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 50])
@pytest.mark.parametrize("layer", [None, -1])
def test_gradient_norms_take_one_forward_and_its_backward(
    layer: int | None, chunk: int, guesser: Path, tmp_path: Path
) -> None:
    """6PT, as they are charged; by torch's own counter. Of logits in chunks the head is computed
    again."""
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6), batch=BATCH)
    learner, loss = trainer.learner, trainer.slots.loss
    learner.memory = dataclasses.replace(learner.memory, tokens_per_logprob_chunk=chunk)
    batch = sampled(trainer)
    assert batch is not None
    wanted = Features(hidden_layer=layer, gradient_norms=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as computed:
        _, flops = learner.observe(batch.fresh, wanted, loss)
    assert flops == pytest.approx(computed.get_total_flops(), rel=1e-3)
    alone = [batch.fresh.take(np.array([row])) for row in range(12)]
    forward = sum(learner.observe(each, Features(layer), loss)[1] for each in alone)
    assert 3.0 * forward <= flops < 3.03 * forward
