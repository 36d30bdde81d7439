"""The contract every engine keeps, run over all of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.sampling.engine import Engine, EngineSettings, Sampling, load_engine
from tasks.sampling.models import Policy, load_model, load_tokenizer, named_weights, read_policy
from tests.policies import place_policy

SETTINGS = EngineSettings("hf", "cpu", "float32", max_rows=8, memory_fraction=0.3, threads=1, num_processes=1)
SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=12, seed=0)
TOLERANCE = 2e-4  # log-probabilities in float32 against a plain forward


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["qwen", "llama"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder: Path = request.getfixturevalue(request.param)
    layout = Layout(tmp_path_factory.mktemp("data"))
    place_policy(folder, layout, load_model(folder, dtype=torch.float32, device=torch.device("cpu")))
    return read_policy(layout)


@pytest.fixture(scope="module")
def engine(engine_name: str, policy: Policy) -> Engine:
    return load_engine(dataclasses.replace(SETTINGS, name=engine_name), policy)


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[list[int]]:
    tokenizer = load_tokenizer(policy.folder)
    return [tokenizer(text).input_ids for text in ("12 + 30 =", "Janet has 3 apples and", "the", "12 + 31 =", "a b c")]


def forward_logprobs(
    model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float
) -> list[float]:
    """The slow, plain way: one sequence, no cache."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(completion)), torch.tensor(completion)].tolist()


def test_counts_and_logprobs(engine: Engine, policy: Policy, prompts: list[list[int]]) -> None:
    counts = [3, 1, 7, 2, 4]  # more rows than slots, and groups that end at different times
    finished: list[int] = []
    samples = engine.generate(prompts, counts, SAMPLING, list(range(17)), finished.append)
    assert sum(finished) == len(samples.token_ids) == len(samples.finish_reasons) == 17
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    owners = np.repeat(np.arange(5), counts)
    with torch.no_grad():
        for row, owner in enumerate(owners):
            expected = forward_logprobs(model, prompts[owner], samples.token_ids[row], SAMPLING.temperature)
            np.testing.assert_allclose(samples.logprobs[row], expected, atol=TOLERANCE)


def test_seeds_decide_and_order_does_not(engine: Engine, prompts: list[list[int]]) -> None:
    seeds = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    forward = engine.generate(prompts, [2] * 5, SAMPLING, seeds)
    backward = engine.generate(prompts[::-1], [2] * 5, SAMPLING, seeds[::-1])
    assert forward.token_ids == backward.token_ids[::-1]
    alone = engine.generate(prompts[1:2], [1], SAMPLING, seeds[2:3])
    assert alone.token_ids == forward.token_ids[2:3]
    other = engine.generate(prompts, [2] * 5, SAMPLING, [seed + 100 for seed in seeds])
    assert other.token_ids != forward.token_ids


def test_stop_and_length(engine: Engine, prompts: list[list[int]]) -> None:
    samples = engine.generate(prompts, [40] * 5, SAMPLING, list(range(200)))
    assert set(samples.finish_reasons) == {"stop", "length"}
    for ids, reason in zip(samples.token_ids, samples.finish_reasons, strict=True):
        assert (ids[-1] == 1) == (reason == "stop")
        assert 1 not in ids[:-1]
        assert reason == "stop" or len(ids) == SAMPLING.max_tokens


def test_greedy_takes_the_likeliest(engine: Engine, policy: Policy, prompts: list[list[int]]) -> None:
    samples = engine.generate(prompts, [1] * 5, dataclasses.replace(SAMPLING, temperature=0.0), [0] * 5)
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for prompt, ids in zip(prompts, samples.token_ids, strict=True):
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == ids


def test_truncated_distributions_are_renormalised(engine: Engine, policy: Policy, prompts: list[list[int]]) -> None:
    sampling = dataclasses.replace(SAMPLING, top_k=3)
    samples = engine.generate(prompts, [4] * 5, sampling, list(range(20)))
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for row, ids in enumerate(samples.token_ids):
            prompt = prompts[row // 4]
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
            top = (logits / sampling.temperature).topk(3)
            place = (top.indices == torch.tensor(ids)[:, None]).int().argmax(-1)
            expected = top.values.log_softmax(-1)[torch.arange(len(ids)), place]
            assert (top.indices == torch.tensor(ids)[:, None]).any(-1).all()
            np.testing.assert_allclose(samples.logprobs[row], expected, atol=TOLERANCE)


def test_too_long_a_prompt_is_named(engine: Engine, policy: Policy, prompts: list[list[int]]) -> None:
    long = [5] * (policy.max_length - SAMPLING.max_tokens + 1)
    with pytest.raises(ArtifactError, match=r"prompt 1 has 501 tokens.*512"):
        engine.generate([prompts[0], long], [1, 1], SAMPLING, [0, 1])


def test_weights_replaced_in_place_are_in_effect(engine: Engine, policy: Policy, prompts: list[list[int]]) -> None:
    before = engine.generate(prompts, [2] * 5, SAMPLING, list(range(10)))
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    original = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    try:
        engine.set_weights(named_weights(model))
        after = engine.generate(prompts, [2] * 5, SAMPLING, list(range(10)))
        assert after.token_ids != before.token_ids
        with torch.no_grad():
            for row, ids in enumerate(after.token_ids):
                expected = forward_logprobs(model, prompts[row // 2], ids, SAMPLING.temperature)
                np.testing.assert_allclose(after.logprobs[row], expected, atol=TOLERANCE)
    finally:
        engine.set_weights(original)
    assert engine.generate(prompts, [2] * 5, SAMPLING, list(range(10))).token_ids == before.token_ids


def test_samples_follow_the_distribution(engine: Engine, policy: Policy, prompts: list[list[int]]) -> None:
    one_token = dataclasses.replace(SAMPLING, max_tokens=1)
    samples = engine.generate(prompts[:1], [2000], one_token, list(range(2000)))
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        expected = (model(input_ids=torch.tensor(prompts[:1])).logits[0, -1] / SAMPLING.temperature).softmax(-1).numpy()
    observed = np.bincount([ids[0] for ids in samples.token_ids], minlength=len(expected)) / 2000
    deviation = np.abs(observed - expected) / np.sqrt(expected * (1 - expected) / 2000 + 1e-9)
    assert deviation[expected > 0.01].max() < 4.5


def test_an_unknown_engine_is_named(policy: Policy) -> None:
    with pytest.raises(ParamsError, match=r"engine.name is 'trt'; there is: hf, vllm"):
        load_engine(dataclasses.replace(SETTINGS, name="trt"), policy)
