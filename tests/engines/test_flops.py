"""Executed FLOPs of the ledger, compared with torch's own counter on real models. Attention is
computed by plain products: torch counts nothing for a fused kernel on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.common.accounting.ledger import (
    Architecture,
    Ledger,
    charged_flops,
    decode_flops,
    paper_training_flops,
    prefill_flops,
)
from tasks.engines.engine import Request, Samples
from tasks.engines.flops import completion_flops, sample_flops
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models import policy
from tasks.models.policy import load_tokenizer
from tasks.train.data.rollouts import StepTotals
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import (
    Objective,
    accumulate_gradients,
    enable_activation_checkpointing,
)
from tasks.train.methods.loss import clip
from tasks.train.settings import Correction
from tests.engines.conftest import load
from tests.train.steps import estimated, graded

CORRECTION = Correction(ratio_to="old", level="token", cap=2.0, mode="truncate")


def architecture_of(model: torch.nn.Module) -> Architecture:
    return policy.architecture_of(policy.describe(model))


@sdpa_kernel(SDPBackend.MATH)
@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_flops_of_generation_and_update_agree_with_torch(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    model = load(folder)
    architecture, tokenizer = architecture_of(model), load_tokenizer(folder)
    texts = [
        f"{i} {text}"
        for i in range(4)
        for text in ("12 + 30 =", "Janet has 3 apples and buys 4 more.", "of", "7 -")
    ]
    prompts, counts = [tokenizer(text).input_ids for text in texts], [8] * 16
    sampling = Sampling(1.0, 1.0, 0, 24, 0)
    engine = HfEngine(model, [1], 64, 512)
    with FlopCounterMode(display=False) as generated:
        samples = engine.generate(Request(prompts, counts, list(range(128)), sampling))
    lengths = [len(ids) for ids in samples.token_ids]
    ours = sample_flops(architecture, [*map(len, prompts)], counts, lengths, 1)
    assert ours.sum() == pytest.approx(generated.get_total_flops(), rel=0.03)

    group_B = np.repeat(np.arange(16), 8)
    rollouts = graded(prompts, group_B, samples, np.zeros(128))
    rollouts = estimated(rollouts, np.ones(128))

    loss = clip.Method(clip.Settings())

    for share_prompts in (False, True):
        objective = Objective(loss, CORRECTION, 1.0, None, 0.0, share_prompts, 10**6)
        batches = micro_batches(
            rollouts, np.arange(128), 2048, torch.device("cpu"), by_group=share_prompts
        )
        totals = StepTotals(sum(lengths), 128, 24)
        with FlopCounterMode(display=False) as updated:
            stats = accumulate_gradients(model, batches, rollouts, objective, totals, architecture)
        assert stats.flops == pytest.approx(updated.get_total_flops(), rel=0.03)

    enable_activation_checkpointing(model)
    model.train()
    thrifty = Objective(loss, CORRECTION, 1.0, None, 0.0, False, 64)
    batches = micro_batches(rollouts, np.arange(128), 2048, torch.device("cpu"), by_group=False)
    with FlopCounterMode(display=False) as updated:
        stats = accumulate_gradients(model, batches, rollouts, thrifty, totals, architecture)
    # torch recomputes a layer up to the last product that the backward pass needs; the ledger
    # counts the whole layer
    assert stats.flops == pytest.approx(updated.get_total_flops(), rel=0.04)


# a token of the body costs 120, one of the head 80; attention costs nothing
WITHOUT_ATTENTION = Architecture(
    num_matmul_parameters=100, num_head_parameters=40, num_layers=0, attention_width=0
)
PROMPT = [5] * 10


def test_prefill_is_counted_once_per_group_and_in_blocks() -> None:
    shared = sample_flops(WITHOUT_ATTENTION, [10], [4], [1, 1, 1, 1], 1)
    np.testing.assert_allclose(shared, [(120 * 10 + 80) / 4] * 4)
    # 8 of 10 tokens are shared, and 2 are computed for every completion
    blocks = sample_flops(WITHOUT_ATTENTION, [10], [4], [1, 1, 1, 1], 4)
    np.testing.assert_allclose(blocks, [(120 * 8 + 80) / 4 + 120 * 2] * 4)


def flops_of(versions: list[list[int]], prefix_block: int) -> float:
    """Return the FLOPs of completions of one prompt, with the weights' version of every token."""
    num = len(versions)
    request = Request([PROMPT], [num], [0] * num, Sampling(1.0, 1.0, 0, 9, 0))
    tokens = [[5] * len(each) for each in versions]
    samples = Samples(tokens, [], ["stop"] * num, versions=versions)
    return completion_flops(WITHOUT_ATTENTION, request, samples, prefix_block)


def test_prefill_is_repeated_after_a_swap() -> None:
    # prefill of 10 tokens, 2 decoded; prefill of 10 + 3, 1 decoded; prefill of 10 + 5
    assert flops_of([[0, 0, 0, 1, 1, 4]], 1) == 120 * (10 + 2 + 13 + 1 + 15) + 80 * (3 + 2 + 1)
    assert flops_of([[0] * 6], 1) == 120 * (10 + 5) + 80 * 6
    # both continue with version 1: 8 prompt tokens of the second are in the cache
    pair = [[0, 1], [0, 0, 1]]
    alone = sum(flops_of([each], 4) for each in pair)
    first = sample_flops(WITHOUT_ATTENTION, [10], [2], [1, 2], 4).sum()
    assert flops_of(pair, 4) == first + 120 * (11 + 12 - 8) + 80 * 2 < alone
    # completions with different versions share no prefix
    apart = [[0, 1], [2, 2, 3]]
    assert flops_of(apart, 4) == sum(flops_of([each], 4) for each in apart)


def test_prefill_is_repeated_after_a_stop() -> None:
    prompts, sampling = [[*PROMPT, 7], [*PROMPT, 7, 7]], Sampling(1.0, 1.0, 0, 9, 0)
    request = Request(prompts, [1, 1], [0, 1], sampling, written=[1, 2])
    samples = Samples([[5], [5, 5]], [], ["stop", "stop"])
    found = completion_flops(WITHOUT_ATTENTION, request, samples, 4)
    assert found == 120 * (11 + 12 + 1 - 8) + 80 * 3


def test_ledger_by_hand() -> None:
    architecture = Architecture(
        num_matmul_parameters=10, num_head_parameters=4, num_layers=3, attention_width=5
    )
    # body 6 weights, head 4: 2*6*7 + 2*4*1, attention 4*3*5 a pair, 7*7 pairs
    assert prefill_flops(architecture, 7) == 84 + 8 + 60 * 49
    # a completion of 3 tokens feeds 2 of them back, which see 8 and 9 positions
    assert decode_flops(architecture, 7, 3) == 2 * 10 * 2 + 60 * (8 + 9)
    assert decode_flops(architecture, 7, 1) == 0
    assert (
        charged_flops(architecture, generated=100, updated=50, reference=10)
        == 2 * 10 * 100 + 6 * 10 * 50 + 2 * 10 * 10
    )
    assert charged_flops(architecture, updated=50, update_factor=2.5) == 2.5 * 2 * 10 * 50
    assert paper_training_flops(architecture, 100, has_reference=True) == 12_000
    assert paper_training_flops(architecture, 100, has_reference=False) == 8_000
    ledger = Ledger()
    ledger.add("generate", executed=1e30, charged=2.0, tokens=3)
    ledger.add("update", executed=1e30)
    assert ledger.total("executed") == 2e30
    assert Ledger.from_dict(ledger.as_dict()) == ledger
    with pytest.raises(KeyError, match="rollout"):
        ledger.add("rollout", executed=1.0)
