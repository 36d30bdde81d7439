"""Rollouts under a memory budget: the same samples, the memory they are given, and the order that
predictions make."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common.params import ParamsError
from tasks.engines.engine import Sampling
from tasks.engines.hf.engine import HfEngine
from tasks.models.policy import load_model, load_tokenizer
from tasks.train.methods.generate import batched, micro_groups
from tasks.train.rollouts import Draw, Rollouts

SAMPLING = Sampling(1.0, 1.0, 0, 60, 0)


@pytest.fixture(scope="module")
def world(qwen: Path) -> tuple[Any, list[list[int]]]:
    tokenizer = load_tokenizer(qwen)
    prompts = [
        tokenizer(text).input_ids
        for text in ("12 + 30 =", "Janet has 3 apples and", "the", "12 + 30 =")
    ]
    return load_model(qwen, dtype=torch.float32, device=torch.device("cpu")), prompts


def draw_of(prompts: list[list[int]], size: int) -> Draw:
    total = len(prompts) * size
    return Draw(
        prompts,
        [size] * len(prompts),
        list(range(100, 100 + total)),
        SAMPLING,
        list(range(len(prompts))),
    )


@pytest.mark.parametrize("order", ["fifo", "lpt", "sjf"])
def test_a_group_of_32_in_less_than_half_the_memory_gives_the_same_samples(
    world: Any, order: Any
) -> None:
    model, prompts = world
    draw = draw_of(prompts, 32)
    full, thrifty = HfEngine(model, [1], 32, 512), HfEngine(model, [1], 32, 512)
    expected = batched.generate({}, full, draw)
    budget = 0.45 * full.peak_cache_bytes / 2**20
    state = micro_groups.start(4, cache_megabytes=budget, order=order)
    state["history"] = np.random.default_rng(0).uniform(
        1, 60, (100, 3)
    )  # predictions of no use change no sample
    samples = micro_groups.generate(state, thrifty, draw)
    assert samples.token_ids == expected.token_ids
    assert samples.finish_reasons == expected.finish_reasons
    np.testing.assert_allclose(
        np.concatenate(samples.logprobs), np.concatenate(expected.logprobs), atol=1e-4
    )
    assert 0 < thrifty.peak_cache_bytes <= budget * 2**20
    assert thrifty.peak_cache_bytes <= 0.5 * full.peak_cache_bytes
    distinct = {tuple(prompt) for prompt in prompts}
    assert thrifty.prefilled_tokens == sum(
        map(len, distinct)
    )  # each distinct prompt is read once, for all its rounds


def test_one_slot_is_enough_and_less_is_refused(world: Any) -> None:
    model, prompts = world
    engine = HfEngine(model, [1], 32, 512)
    longest = max(map(len, prompts))
    least = engine.cache_bytes(longest + SAMPLING.max_tokens) + engine.cache_bytes(longest)
    state = micro_groups.start(4, cache_megabytes=least / 2**20, order="lpt")
    draw = draw_of(prompts, 2)
    assert (
        micro_groups.generate(state, engine, draw).token_ids
        == batched.generate({}, engine, draw).token_ids
    )
    state = micro_groups.start(4, cache_megabytes=0.99 * least / 2**20, order="lpt")
    with pytest.raises(
        ParamsError, match=r"train\.generate\.cache_megabytes is .*one rollout may take"
    ):
        micro_groups.generate(state, engine, draw)


def test_an_engine_with_a_scheduler_of_its_own_is_refused(world: Any) -> None:
    class Other:
        name = "vllm"

    state = micro_groups.start(4, cache_megabytes=9.0, order="lpt")
    with pytest.raises(ParamsError, match=r"engine\.name hf; vllm batches continuously by itself"):
        micro_groups.generate(state, Other(), draw_of(world[1], 2))  # type: ignore[arg-type]


def test_predictions_learn_which_prompts_are_long() -> None:
    rng = np.random.default_rng(0)
    state = micro_groups.start(6, cache_megabytes=9.0, order="lpt")
    prompts = [[1] * 5] * 6
    means = np.array([5, 40, 10, 80, 20, 60])
    draw = Draw(prompts, [8] * 6, list(range(48)), SAMPLING, list(range(6)))
    assert micro_groups.predict(state, draw).tolist() == [0.0] * 6
    for _ in range(5):
        lengths = np.maximum(rng.poisson(np.repeat(means, 8)), 1)
        group_B = np.repeat(np.arange(6), 8)
        samples = type("S", (), {"token_ids": [[7] * n for n in lengths]})()
        rollouts = Rollouts(
            np.arange(6), prompts, group_B, samples, [""] * 48, ["wrong"] * 48, np.zeros(48)
        )
        micro_groups.observe(state, rollouts)
    predicted = micro_groups.predict(state, draw)
    assert np.argsort(predicted).tolist() == np.argsort(means).tolist()
    order = micro_groups.start_order(predicted, group_B, "lpt")
    assert group_B[order].tolist() == np.repeat([3, 5, 1, 4, 2, 0], 8).tolist()
    assert micro_groups.start_order(predicted, group_B, "fifo").tolist() == list(range(48))
    unknown = Draw(
        prompts, [8] * 6, list(range(48)), SAMPLING, None
    )  # validation prompts: nothing of their own
    assert np.ptp(micro_groups.predict(state, unknown)) == 0
