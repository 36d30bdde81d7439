"""The bonus for the policy's entropy: its gradient, its coefficient, and its cost."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.accounting.ledger import charged_flops
from tasks.train.learner.update import entropies
from tasks.train.loop.loop import learn
from tasks.train.methods.loss import clip
from tasks.train.settings import Entropy
from tests.train.worlds import (
    make_trainer,
    make_world,
    sampled,
)


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
    changes = {"batch": {"size": 24}, "loss": clip_with(coefficient=0.01)}
    trainer = make_trainer(layout, **changes)
    batch = sampled(trainer)
    estimated = trainer.estimate(batch.fresh, trainer.rng())
    assert 0 < estimated.has_advantage_B().sum() < len(estimated.group_B)
    learn(trainer, batch)
    tokens = float(batch.fresh.tokens_B().sum())
    charged = charged_flops(trainer.run.policy.architecture, updated=tokens)
    assert trainer.state.ledger.charged_mixed["update"] == charged
