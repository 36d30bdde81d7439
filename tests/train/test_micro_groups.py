"""Rollouts within a memory budget: the same samples, the memory limit, and the order by
predictions."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.common.params import ParamsError
from tasks.engines.engine import Request, Samples
from tasks.engines.hf.cache import KVCache, Prefill
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models.policy import load_tokenizer
from tasks.train.methods.generate import micro_groups
from tasks.train.methods.generate.micro_groups import queue
from tests.engines.conftest import load
from tests.train.steps import asked_of, graded

SAMPLING = Sampling(1.0, 1.0, 0, 60, 0)


@pytest.fixture(scope="module")
def world(qwen: Path) -> tuple[Any, list[list[int]]]:
    tokenizer = load_tokenizer(qwen)
    texts = ("12 + 30 =", "Janet has 3 apples and", "the", "12 + 30 =")
    return load(qwen), [tokenizer(text).input_ids for text in texts]


def request_of(prompts: list[list[int]], size: int) -> Request:
    total = len(prompts) * size
    return Request(prompts, [size] * len(prompts), list(range(100, 100 + total)), SAMPLING)


@pytest.fixture
def cached_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of all keys and values whenever slots have been filled."""
    sizes, prefills = list[int](), list[weakref.ref[Prefill]]()
    fill, create = KVCache.fill, Prefill.__init__

    def filled(cache: KVCache, *prompts: Any) -> None:
        fill(cache, *prompts)
        alive = [kept for made in prefills if (kept := made())]
        pairs = [(*cache.keys, *cache.values), *(pair for kept in alive for pair in kept.states)]
        sizes.append(sum(states.nbytes for pair in pairs for states in pair))

    def created(prefill: Prefill, *parts: Any) -> None:
        create(prefill, *parts)
        prefills.append(weakref.ref(prefill))

    monkeypatch.setattr(KVCache, "fill", filled)
    monkeypatch.setattr(Prefill, "__init__", created)
    return sizes


@pytest.mark.parametrize("order", ["fifo", "lpt", "sjf"])
def test_a_group_of_32_in_less_than_half_the_memory_gives_the_same_samples(
    world: Any, order: Any, prefilled: list[int], cached_bytes: list[int]
) -> None:
    model, prompts = world
    request = request_of(prompts, 32)
    engine = HfEngine(model, [1], 32, 512)
    expected = engine.generate(request)
    budget = 0.45 * max(cached_bytes)
    cached_bytes.clear()
    prefilled.clear()
    method = micro_groups.Method(micro_groups.Settings(budget / 2**20, order), 4)
    # useless predictions change no sample
    method.state.history = np.random.default_rng(0).uniform(1, 60, (100, 3))
    samples = method.generate(engine, request, asked_of(np.arange(4)))
    assert samples.token_ids == expected.token_ids
    assert samples.finish_reasons == expected.finish_reasons
    np.testing.assert_allclose(
        np.concatenate(samples.logprobs), np.concatenate(expected.logprobs), atol=1e-4
    )
    assert 0 < max(cached_bytes) <= budget
    # each distinct prompt is read once for all its rounds
    assert sum(prefilled) == sum(map(len, {tuple(prompt) for prompt in prompts}))


def test_one_slot_is_enough_and_less_is_refused(world: Any) -> None:
    model, prompts = world
    engine = HfEngine(model, [1], 32, 512)
    longest = max(map(len, prompts))
    least = engine.cache_bytes(longest + SAMPLING.max_tokens) + engine.cache_bytes(longest)
    method = micro_groups.Method(micro_groups.Settings(least / 2**20, "lpt"), 4)
    request = request_of(prompts, 2)
    samples = method.generate(engine, request, asked_of(np.arange(4)))
    assert samples.token_ids == engine.generate(request).token_ids
    method = micro_groups.Method(micro_groups.Settings(0.99 * least / 2**20, "lpt"), 4)
    message = r"train\.generate\.cache_megabytes is .*one rollout may need"
    with pytest.raises(ParamsError, match=message):
        method.generate(engine, request, asked_of(np.arange(4)))


def test_an_engine_with_its_own_scheduler_is_refused(world: Any) -> None:
    class Other:
        name = "vllm"

    method = micro_groups.Method(micro_groups.Settings(9.0, "lpt"), 4)
    with pytest.raises(ParamsError, match=r"engine\.name hf; vllm has its own scheduler"):
        method.generate(Other(), request_of(world[1], 2), asked_of(None))  # type: ignore[arg-type]


def test_predictions_order_prompts_by_length() -> None:
    rng = np.random.default_rng(0)
    method = micro_groups.Method(micro_groups.Settings(9.0, "lpt"), 6)
    prompts = [[1] * 5] * 6
    means = np.array([5, 40, 10, 80, 20, 60])
    request = Request(prompts, [8] * 6, list(range(48)), SAMPLING)
    assert method.predict(request, np.arange(6)).tolist() == [0.0] * 6
    for _ in range(5):
        lengths = np.maximum(rng.poisson(np.repeat(means, 8)), 1)
        group_B = np.repeat(np.arange(6), 8)
        tokens = [[7] * n for n in lengths]
        samples = Samples(tokens, [[0.0] * n for n in lengths], ["stop"] * 48)
        rollouts = graded(prompts, group_B, samples, np.zeros(48))
        method.observe(rollouts)
    predicted = method.predict(request, np.arange(6))
    assert np.argsort(predicted).tolist() == np.argsort(means).tolist()
    order = queue(predicted[group_B], "lpt")
    assert group_B[order].tolist() == np.repeat([3, 5, 1, 4, 2, 0], 8).tolist()
    assert queue(predicted[group_B], "fifo").tolist() == list(range(48))
    assert np.ptp(method.predict(request, None)) == 0  # prompts of validation have no predictions
