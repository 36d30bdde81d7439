"""What only a GPU can show. Run with `make test ARGS="-m gpu"` on a machine that has one; elsewhere
it is skipped.

Random weights at real shapes: a bfloat16 step, the `hf` engine on CUDA, peak memory and tokens a
second at 0.5B and 1.5B, and a resumed run."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tasks.engines.engine import Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models.packing import ATTENTION
from tasks.models.policy import load_model
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import Objective, UpdateStats, accumulate_gradients
from tasks.train.methods.loss import clip
from tasks.train.rollouts import Rollouts, StepTotals
from tasks.train.settings import Correction
from tests.engines.test_flops import architecture_of
from tests.train.steps import estimated, graded

pytestmark = pytest.mark.gpu

SHAPES = {
    "0.5B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.5B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
}
SAMPLING = Sampling(1.0, 1.0, 0, 256, 0)

CORRECTION = Correction(ratio_to="old", level="token", cap=2.0, mode="truncate")


def make_model(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        **SHAPES[name],
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation(ATTENTION)
    return model


def draw(model: Any, num_prompts: int, group_size: int) -> Rollouts:
    prompts = [[(7 * i + j) % 1000 + 10 for j in range(100)] for i in range(num_prompts)]
    counts, total = [group_size] * num_prompts, num_prompts * group_size
    samples = HfEngine(model, [1], 256, 4096).generate(
        Request(prompts, counts, list(range(total)), SAMPLING)
    )
    group_B = np.repeat(np.arange(num_prompts), group_size)
    rewards = np.arange(total) % 2.0
    return graded(prompts, group_B, samples, rewards)


def update(
    model: Any, rollouts: Rollouts, dtype: torch.dtype, share_prompts: bool = True
) -> UpdateStats:
    loss = clip.Method(clip.EXAMPLE)

    rows, advantages = np.arange(len(rollouts.group_B)), np.where(rollouts.rewards_B > 0, 1.0, -1.0)
    totals = StepTotals(int(rollouts.completion_tokens_B().sum()), len(rows), SAMPLING.max_tokens)
    objective = Objective(loss, CORRECTION, 1.0, None, 0.0, share_prompts, 4096)
    rollouts = estimated(rollouts, advantages)
    batches = micro_batches(rollouts, rows, 16_384, torch.device("cuda"), by_group=share_prompts)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        return accumulate_gradients(
            model, batches, rollouts, objective, totals, architecture_of(model)
        )


def test_the_engine_samples_the_same_on_cuda_and_cpu(guesser: Path) -> None:
    prompts, sampling = [[20, 14, 20, 3, 32]] * 4, dataclasses.replace(SAMPLING, max_tokens=8)
    drawn = []
    for device in ("cpu", "cuda"):
        model = load_model(guesser, dtype=torch.float32, device=torch.device(device))
        drawn.append(
            HfEngine(model, [1], 64, 512).generate(
                Request(prompts, [8] * 4, list(range(32)), sampling)
            )
        )
    same = sum(a == b for a, b in zip(drawn[0].token_ids, drawn[1].token_ids, strict=True))
    assert same >= 31  # a uniform number may fall between two roundings
    np.testing.assert_allclose(
        np.concatenate(drawn[0].logprobs)[:8], np.concatenate(drawn[1].logprobs)[:8], atol=1e-4
    )


def test_a_bfloat16_step_is_close_to_a_float32_one() -> None:
    model = make_model("0.5B", torch.float32)
    rollouts = draw(model, 2, 4)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad(set_to_none=True)
        stats = update(model, rollouts, dtype)
        assert float(torch.cat(stats.log_ratios).abs().mean()) < (
            1e-3 if dtype == torch.float32 else 0.05
        )
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()
        )
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.95


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_tokens_a_second_and_peak_memory(name: str, record_property: Any) -> None:
    model = make_model(name, torch.bfloat16)
    draw(model, 2, 2)  # warm up
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    rollouts = draw(model, 32, 8)
    torch.cuda.synchronize()
    tokens = int(rollouts.completion_tokens_B().sum())
    generated = tokens / (time.perf_counter() - started)
    started = time.perf_counter()
    update(model, rollouts, torch.bfloat16)
    torch.cuda.synchronize()
    updated, peak = (
        tokens / (time.perf_counter() - started),
        torch.cuda.max_memory_allocated() / 2**30,
    )
    print(
        f"\n{name}: {generated:,.0f} generated and {updated:,.0f} updated tokens/s, peak "
        f"{peak:.1f} GiB"
    )
    for key, value in (("generated", generated), ("updated", updated), ("peak_gib", peak)):
        record_property(key, value)
    assert tokens > 0
    assert peak < torch.cuda.get_device_properties(0).total_memory / 2**30
