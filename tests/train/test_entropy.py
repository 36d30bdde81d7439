"""The bonus for the policy's entropy: its gradient, its coefficient, and its cost."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common.accounting.ledger import charged_flops
from tasks.train.learner.update import entropies
from tasks.train.loop.loop import learn
from tasks.train.methods.loss import clip
from tasks.train.settings import Entropy
from tests.train.worlds import (
    PARAMS,
    make_trainer,
    make_world,
    sampled,
)

BATCH = PARAMS["train"]["batch"]


def clip_with(**entropy: Any) -> dict[str, Any]:
    """The loss of the world with a bonus."""
    return {"method": "clip", "normalize": "token", "entropy": entropy}


def test_the_gradient_of_the_entropy_of_two_arms() -> None:
    """By the logits: -p (log p + H), with p = 0.8 and 0.2."""
    logits = torch.tensor([[0.8, 0.2]], dtype=torch.float64).log().requires_grad_()
    entropy = entropies(logits.log_softmax(-1))
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.500402, abs=1e-6)
    assert logits.grad is not None
    # 0.8 * 0.2 * log(0.2 / 0.8) for the first arm, and the opposite for the other
    assert logits.grad[0].tolist() == pytest.approx([-0.221807, 0.221807], abs=1e-6)
    scores = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entropies(x.log_softmax(-1)), [scores])


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
@pytest.mark.parametrize("chunk", [3, 4096])
def test_the_bonus_is_for_the_mean_entropy_of_what_is_kept(
    chunk: int, normalize: str, guesser: Path, tmp_path: Path
) -> None:
    """Its gradient by plain autograd, of whole rollouts one at a time."""
    changes = {**clip_with(coefficient=0.5), "normalize": normalize}
    layout = make_world(tmp_path, guesser, [4] * 6)
    trainer = make_trainer(layout, batch=BATCH, max_grad_norm=1e9, loss=changes)
    batch, learner = sampled(trainer), trainer.learner
    learner.memory = dataclasses.replace(learner.memory, tokens_per_logprob_chunk=chunk)
    keep_B = np.arange(12) % 4 < 3
    nothing_N = np.zeros(len(batch.fresh.owner_N()))
    learner.compute_gradient(batch.fresh.estimated(keep_B, nothing_N), trainer.slots.loss)
    found = [parameter.grad.clone() for parameter in learner.model.parameters()]
    terms = []
    for row in np.flatnonzero(keep_B):
        prompt, ids = batch.fresh.table["prompt", "token_ids"].row(int(row))
        logits = learner.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        terms.append(torch.distributions.Categorical(logits=logits).entropy())
    mean = {
        "token": torch.cat(terms).mean(),
        "sequence": torch.stack([term.mean() for term in terms]).mean(),
        "constant": torch.cat(terms).sum() / (len(terms) * 8),
    }[normalize]
    expected = torch.autograd.grad(-0.5 * mean, [*learner.model.parameters()])
    assert max(float(part.abs().max()) for part in expected) > 1e-3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_the_coefficient_follows_the_entropy() -> None:
    method = clip.Method(clip.Settings(entropy=Entropy(0.01, target=0.2, step=0.005, most=0.02)))
    found = [method.bonus()]  # no entropy is known before the first update
    for entropy in (0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.1):
        method.observe_entropy(entropy)
        found.append(method.bonus())
    assert found == pytest.approx([0, 0.015, 0.02, 0.02, 0, 0, 0, 0, 0, 0.005])
    constant = clip.Method(clip.Settings(entropy=Entropy(0.01)))
    constant.observe_entropy(9.0)
    assert constant.bonus() == 0.01


def test_all_that_is_kept_is_computed_and_charged(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [3] * 24)
    changes = {"batch": {**BATCH, "size": 24}, "loss": clip_with(coefficient=0.01)}
    trainer = make_trainer(layout, **changes)
    batch = sampled(trainer)
    estimated = trainer.estimate(batch.fresh, trainer.rng())
    assert 0 < estimated.has_advantage_B().sum() < len(estimated.group_B)
    learn(trainer, batch)
    tokens = float(batch.fresh.tokens_B().sum())
    charged = charged_flops(trainer.run.policy.architecture, updated=tokens)
    assert trainer.state.ledger.charged_mixed["update"] == charged
