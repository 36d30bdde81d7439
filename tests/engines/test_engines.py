"""The contract of engines, tested with every file of `engines/`."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tasks import engines
from tasks.common import registry
from tasks.common.files import ArtifactError
from tasks.engines.engine import Engine, Request, StoppableEngine
from tasks.engines.loading import load_engine
from tasks.engines.settings import Sampling
from tasks.engines.vllm import VllmEngine
from tasks.models.policy import Policy, load_tokenizer
from tasks.models.weights import NamedWeights
from tests.engines.conftest import Servers, load, logits_of, logprob_gaps, placed
from tests.policies import ENGINE

SETTINGS = dataclasses.replace(ENGINE, max_rows=8)
SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=12, seed=0)
TOLERANCE = 2e-4  # log-probabilities in float32 against a plain forward
BY_VLLM = {"vllm", "server"}


# servers run the code of `vllm`: another architecture would need more servers for the same result
CASES = [
    (name, architecture)
    for name in registry.names(engines)
    for architecture in (["qwen"] if name == "server" else ["qwen", "llama"])
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id="-".join(case), marks=pytest.mark.vllm if case[0] in BY_VLLM else ())
        for case in CASES
    ],
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, architecture = request.param
    return name, architecture


@pytest.fixture(scope="module")
def policy(
    case: tuple[str, str],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Policy:
    return placed(request.getfixturevalue(case[1]), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def engine(case: tuple[str, str], policy: Policy, servers: Servers) -> Engine:
    if case[0] == "server":
        return servers.of(policy)
    return load_engine(dataclasses.replace(SETTINGS, name=case[0]), policy)


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[list[int]]:
    tokenizer = load_tokenizer(policy.folder)
    return [
        tokenizer(text).input_ids
        for text in ("12 + 30 =", "Janet has 3 apples and", "the", "12 + 31 =", "a b c")
    ]


@pytest.fixture(scope="module")
def model(policy: Policy) -> PreTrainedModel:
    return load(policy.folder)


def test_counts_ends_and_logprobs(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    counts = [40, 1, 97, 2, 60]  # more rows than slots, and groups that end at different times
    ended: dict[int, tuple[list[int], str]] = {}

    def on_ended(row: int, token_ids: Sequence[int], reason: str) -> None:
        assert row not in ended
        ended[row] = (list(token_ids), reason)

    request = Request(prompts, counts, list(range(200)), SAMPLING)
    samples = engine.generate(request, on_ended)
    rows = list(zip(samples.token_ids, samples.finish_reasons, strict=True))
    assert [ended[row] for row in range(200)] == rows
    assert max(gap.max() for gap in logprob_gaps(model, request, samples)) < TOLERANCE
    assert set(samples.finish_reasons) == {"stop", "length"}
    for ids, reason in rows:
        assert (ids[-1] == 1) == (reason == "stop")
        assert 1 not in ids[:-1]
        assert reason == "stop" or len(ids) == SAMPLING.max_tokens


def test_completions_depend_on_seeds_alone(engine: Engine, prompts: list[list[int]]) -> None:
    seeds = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    request = Request(prompts, [2] * 5, seeds, SAMPLING)
    forward = engine.generate(request)
    backward = engine.generate(Request(prompts[::-1], [2] * 5, seeds[::-1], SAMPLING))
    assert forward.token_ids == backward.token_ids[::-1]
    alone = engine.generate(Request(prompts[1:2], [1], seeds[2:3], SAMPLING))
    assert alone.token_ids == forward.token_ids[2:3]
    found = engine.generate(dataclasses.replace(request, with_logprobs=False))
    assert (found.token_ids, found.finish_reasons) == (forward.token_ids, forward.finish_reasons)
    assert len(found.logprobs) == 10
    other = engine.generate(Request(prompts, [2] * 5, [seed + 100 for seed in seeds], SAMPLING))
    assert other.token_ids != forward.token_ids


def test_stopped_completions_can_be_continued(
    engine: Engine, policy: Policy, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    assert isinstance(engine, StoppableEngine)
    # as long as can be: a busy machine may finish short ones before the stop arrives
    room = policy.max_length - max(map(len, prompts))
    sampling = dataclasses.replace(SAMPLING, max_tokens=room)
    request = Request(prompts, [3] * 5, list(range(15)), sampling)
    owners, ends = request.owner_B().tolist(), dict[int, tuple[list[int], str]]()

    def at_the_second(row: int, token_ids: Sequence[int], reason: str) -> bool:
        assert row not in ends
        ends[row] = (list(token_ids), reason)
        return len(ends) >= 2

    first = engine.generate_until(request, at_the_second)
    assert 2 <= len(ends) < 15
    for row, (ids, reason) in enumerate(zip(first.token_ids, first.finish_reasons, strict=True)):
        assert len(ids) == len(first.logprobs[row])
        assert ends.get(row, (ids, "abort")) == (ids, reason)
    continued = [row for row in range(15) if row not in ends and first.token_ids[row]]
    assert continued
    rest = Request(
        [[*prompts[owners[row]], *first.token_ids[row]] for row in continued],
        [1] * len(continued),
        [request.seeds[row] for row in continued],
        sampling,
        written=[len(first.token_ids[row]) for row in continued],
    )
    second = engine.generate_until(rest, lambda *_: False)
    whole = engine.generate(request)
    for place, row in enumerate(continued):
        first.logprobs[row].extend(second.logprobs[place])
        first.token_ids[row].extend(second.token_ids[place])
        ids = first.token_ids[row]
        is_full = len(ids) == sampling.max_tokens and ids[-1] != 1
        assert second.finish_reasons[place] == ("length" if is_full else "stop")
        if engine.name == "hf":  # its random numbers depend on the position
            assert ids == whole.token_ids[row]
    gaps = logprob_gaps(model, request, first)
    assert max(gaps[row].max() for row in continued) < TOLERANCE


def test_continued_completion_gets_another_seed() -> None:
    request = Request([[3], [3, 4, 5]], [2, 1], [7, 8, 7], SAMPLING, written=[0, 2])
    assert request.written_B().tolist() == [0, 0, 2]
    assert request.own_seeds()[:2] == [7, 8]
    assert request.own_seeds()[2] not in (7, 8)


def test_greedy_chooses_the_most_likely_token(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    samples = engine.generate(Request(prompts, [1] * 5, [0] * 5, greedy))
    for prompt, ids in zip(prompts, samples.token_ids, strict=True):
        assert logits_of(model, prompt, ids).argmax(-1).tolist() == ids


def test_truncated_distributions_are_renormalised(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    sampling = dataclasses.replace(SAMPLING, top_k=3)
    samples = engine.generate(Request(prompts, [4] * 5, list(range(20)), sampling))
    for row, ids in enumerate(samples.token_ids):
        top = (logits_of(model, prompts[row // 4], ids) / sampling.temperature).topk(3)
        place = (top.indices == torch.tensor(ids)[:, None]).int().argmax(-1)
        expected = top.values.log_softmax(-1)[torch.arange(len(ids)), place]
        assert (top.indices == torch.tensor(ids)[:, None]).any(-1).all()
        np.testing.assert_allclose(samples.logprobs[row], expected, atol=TOLERANCE)


def test_requests_without_completions(engine: Engine, prompts: list[list[int]]) -> None:
    assert engine.generate(Request([], [], [], SAMPLING)).token_ids == []
    assert len(engine.generate(Request(prompts[:2], [0, 2], [1, 2], SAMPLING)).token_ids) == 2


def test_prefill_is_shared_by_the_samples_of_a_prompt(
    engine: Engine, prefilled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the prefilled tokens with the shared blocks that FLOPs are counted with."""
    if isinstance(engine, VllmEngine):
        inner, step = engine.llm.llm_engine, engine.llm.llm_engine.step

        def spied() -> list[Any]:
            outputs: list[Any] = step()
            computed = (len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs)
            prefilled.extend(computed)
            return outputs

        monkeypatch.setattr(inner, "step", spied)

    def count_prefilled() -> float:
        found = Counter(engine.metrics())
        return sum(prefilled) + found["engine/prompt_tokens"] - found["engine/prompt_tokens_cached"]

    length, count, block = 300, 6, engine.prefix_block
    prompt = [3 + (7 * i) % 90 for i in range(length)]
    before = count_prefilled()
    engine.generate(Request([prompt], [count], list(range(count)), SAMPLING))
    shared = (length - 1) // block * block if block > 1 else length
    assert shared > 0
    assert count_prefilled() - before == shared + count * (length - shared)


def test_prompt_that_does_not_fit_is_named(
    engine: Engine, policy: Policy, prompts: list[list[int]]
) -> None:
    long = [5] * (policy.max_length - SAMPLING.max_tokens + 1)
    with pytest.raises(ArtifactError, match=r"prompt 1 has 501 tokens.*512"):
        engine.generate(Request([prompts[0], long], [1, 1], [0, 1], SAMPLING))
    samples = engine.generate(Request([prompts[0], long[1:]], [1, 1], [0, 1], SAMPLING))
    assert samples.finish_reasons[1] == "stop" or len(samples.token_ids[1]) == SAMPLING.max_tokens
    with pytest.raises(ArtifactError, match="prompt 1 has no tokens"):
        engine.generate(Request([prompts[0], [], prompts[1]], [1, 1, 1], [0, 1, 2], SAMPLING))


def test_weights_replaced_in_place_are_in_effect(
    engine: Engine, policy: Policy, prompts: list[list[int]]
) -> None:
    request = Request(prompts, [2] * 5, list(range(10)), SAMPLING)
    before, model = engine.generate(request), load(policy.folder)
    original = {name: tensor.clone() for name, tensor in NamedWeights(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.add_(0.05 * noise)
    if isinstance(engine, VllmEngine):
        # as with a trainer on a GPU; on a CPU vLLM pauses and clears prefixes, but frees no memory
        engine.can_sleep = True
    try:
        engine.sleep()
        assert not isinstance(engine, VllmEngine) or engine.asleep
        engine.set_weights(NamedWeights(model))
        after = engine.generate(request)
        assert after.token_ids != before.token_ids
        assert max(gap.max() for gap in logprob_gaps(model, request, after)) < TOLERANCE
    finally:
        engine.set_weights(original)
    engine.sleep()
    assert engine.generate(request).token_ids == before.token_ids


def test_samples_follow_the_distribution(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    two_tokens = dataclasses.replace(SAMPLING, max_tokens=2)
    samples = engine.generate(Request(prompts[:1], [2000], list(range(2000)), two_tokens))
    expected = (logits_of(model, prompts[0], [0])[0] / SAMPLING.temperature).softmax(-1).numpy()
    observed = np.bincount([ids[0] for ids in samples.token_ids], minlength=len(expected)) / 2000
    deviation = np.abs(observed - expected) / np.sqrt(expected * (1 - expected) / 2000 + 1e-9)
    assert deviation[expected > 0.01].max() < 4.5
    # a completion may consist of the stop token alone
    empty = [row for row, ids in enumerate(samples.token_ids) if ids[0] == 1]
    assert empty
    assert {len(samples.token_ids[row]) for row in empty} == {1}
    assert {samples.finish_reasons[row] for row in empty} == {"stop"}
