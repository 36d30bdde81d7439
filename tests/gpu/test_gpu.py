"""Tests on a GPU, with random weights at real shapes. Elsewhere they are skipped."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.engines.engine import Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models.packing import pack, supports_flash
from tasks.models.policy import load_model
from tests.gpu.check.parts.engine import GROUP, PROMPTS, draw
from tests.gpu.check.parts.update import gradient, make_learner
from tests.gpu.check.shapes import Sizes
from tests.train.steps import estimated, graded

pytestmark = pytest.mark.gpu

SIZES = Sizes(is_small=False)


def test_engine_samples_the_same_on_cuda_and_cpu(guesser: Path) -> None:
    request = Request([[20, 14, 20, 3, 32]] * 4, [8] * 4, range(32), Sampling(1.0, 1.0, 0, 8, 0))
    drawn = []
    for device in ("cpu", "cuda"):
        model = load_model(guesser, dtype=torch.float32, device=torch.device(device))
        drawn.append(HfEngine(model, [1], 64, 512).generate(request))
    same = sum(a == b for a, b in zip(drawn[0].token_ids, drawn[1].token_ids, strict=True))
    assert same >= 31  # a uniform number may fall between two roundings
    np.testing.assert_allclose(
        np.concatenate(drawn[0].logprobs)[:8], np.concatenate(drawn[1].logprobs)[:8], atol=1e-4
    )


@pytest.mark.parametrize("is_compiled", [False, True])
def test_bfloat16_gradient_is_close_to_float32(is_compiled: bool) -> None:
    exact = make_learner("0.5B", SIZES, dtype="float32")
    rounded = make_learner("0.5B", SIZES, dtype="bfloat16", compile=is_compiled)
    samples = draw(exact.model, 2, GROUP, SIZES.new_tokens)
    rewards = np.arange(2 * GROUP) % 2.0
    rollouts = graded(PROMPTS[:2], np.repeat([0, 1], GROUP), samples, rewards)
    rollouts = estimated(rollouts, np.where(rewards > 0, 1.0, -1.0))
    gradients = []
    for learner, limit in ((exact, 1e-3), (rounded, 0.05)):
        ratios = torch.cat(gradient(learner, rollouts).log_ratios)
        assert float(ratios.abs().mean()) < limit
        found = [p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found).cpu())
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.95


@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("window", [None, 6, 100])
def test_flash_attention_agrees_with_the_blocks(
    window: int | None, heads: tuple[int, int, int]
) -> None:
    """In bfloat16, against the blocks in float32, with the gradients."""
    num_heads, num_kv_heads, size = heads
    rests, owners = [[6] * 90, [1], [3] * 40, [], [4] * 20], np.array([0, 1, 1, 0, 0])
    packed, _, _ = pack([[7] * 120, [5] * 3], owners, rests, SIZES.device)
    torch.manual_seed(0)
    states = [
        torch.randn(len(packed.ids), number, size, device=SIZES.device)
        for number in (num_heads, num_kv_heads, num_kv_heads)
    ]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [part.to(torch.bfloat16).to(dtype).requires_grad_() for part in states]
        assert supports_flash(leaves[2]) == (dtype == torch.bfloat16)
        output = packed.attend(0, *leaves, size**-0.5, window)
        output.square().sum().backward()
        found.append([output, *(leaf.grad for leaf in leaves)])
    for exact, rounded in zip(*found, strict=True):
        assert float((exact - rounded).norm() / exact.norm()) < 0.01
