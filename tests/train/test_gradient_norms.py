"""Gradient norms of rollouts, and the coefficient of the entropy bonus."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.common.params import ParamsError
from tasks.train.data.rollouts import Features
from tasks.train.methods.loss import clip
from tasks.train.settings import Entropy
from tests.train.worlds import make_trainer, make_world, sampled


def test_a_gradient_norm_does_not_depend_on_other_rollouts(guesser: Path, tmp_path: Path) -> None:
    """It is the norm that autograd computes for the rollout alone."""
    layout = make_world(tmp_path, guesser, [4] * 6)
    trainer = make_trainer(layout)
    batch = sampled(trainer)
    wanted = Features(gradient_norms=True)
    seen, _ = trainer.learner.score(batch.fresh, wanted, trainer.slots.loss)
    assert seen.gradient_norms_B is not None
    for row in (0, 5, 11):
        alone = batch.fresh.take(np.array([row]))
        one, _ = trainer.learner.score(alone, wanted, trainer.slots.loss)
        assert one.gradient_norms_B == pytest.approx(seen.gradient_norms_B[row : row + 1], rel=1e-4)
    plain, _ = trainer.learner.score(batch.fresh, Features(), trainer.slots.loss)
    np.testing.assert_allclose(seen.logprobs_N, plain.logprobs_N, atol=1e-4)
    with pytest.raises(ParamsError, match=r"train.advantage.layer is 3, but the policy has 2"):
        make_trainer(layout, advantage={"method": "poise", "layer": 3})


@pytest.mark.parametrize("chunk", [1, 50])
@pytest.mark.parametrize("layer", [None, -1])
def test_gradient_norms_take_one_forward_and_its_backward(
    layer: int | None, chunk: int, guesser: Path, tmp_path: Path
) -> None:
    """torch counts the charged 6PT; logits in chunks compute the head twice."""
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6))
    learner, loss = trainer.learner, trainer.slots.loss
    learner.memory = dataclasses.replace(learner.memory, tokens_per_logprob_chunk=chunk)
    batch = sampled(trainer)
    wanted = Features(hidden_layer=layer, gradient_norms=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as computed:
        _, flops = learner.score(batch.fresh, wanted, loss)
    assert flops == pytest.approx(computed.get_total_flops(), rel=1e-3)
    alone = [batch.fresh.take(np.array([row])) for row in range(12)]
    forward = sum(learner.score(each, Features(layer), loss)[1] for each in alone)
    assert 3.0 * forward <= flops < 3.03 * forward


def test_the_coefficient_follows_the_entropy() -> None:
    method = clip.Method(clip.Settings(entropy=Entropy(0.01, target=0.2, step=0.005, most=0.02)))
    found = [method.bonus()]  # there is no entropy before the first update
    for entropy in (0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.1):
        method.observe_entropy(entropy)
        found.append(method.bonus())
    assert found == pytest.approx([0, 0.015, 0.02, 0.02, 0, 0, 0, 0, 0, 0.005])
    constant = clip.Method(clip.Settings(entropy=Entropy(0.01)))
    constant.observe_entropy(9.0)
    assert constant.bonus() == 0.01
