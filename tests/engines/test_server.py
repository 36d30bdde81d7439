"""The engine `server` against servers that fail, come back, lie, or are another's."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tasks import engines
from tasks.common import registry
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Engine, Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.loading import engine_name, load_engine
from tasks.engines.server.dispatch import chunked
from tasks.engines.server.engine import ServerEngine
from tasks.engines.settings import Sampling, parse_url
from tasks.models.policy import Policy, load_model
from tasks.models.weights import NamedWeights
from tests.engines.serving import Server
from tests.policies import ENGINE

SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=6, seed=0)
PROMPTS = [[20, 14, 20, 3, 32], [21, 14, 22], [40, 41, 42, 43], [50]]
COUNTS = [6, 6, 6, 6]
SEEDS = list(range(24))

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def local(policy: Policy) -> Engine:
    return load_engine(ENGINE, policy)


@pytest.fixture
def serve(policy: Policy) -> Iterator[Serve]:
    """Starts a server of the policy, or of `weights_seed` another; ended with the test."""
    with ExitStack() as stack:

        def start(names: list[str] | None = None, noise: float = 0.0, **behaviour: Any) -> Server:
            model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0 + noise)
            engine = HfEngine(model, [1], 8, 512)
            return stack.enter_context(Server(engine, names or [policy.digest], **behaviour))

        yield start


def connect(policy: Policy, *servers: Server | str, **settings: Any) -> ServerEngine:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    chosen = dataclasses.replace(ENGINE, name="server", urls=urls, **{"max_rows": 4, **settings})
    engine = load_engine(chosen, policy)
    assert isinstance(engine, ServerEngine)
    return engine


def test_a_server_draws_what_the_engine_behind_it_draws(
    serve: Serve, policy: Policy, local: Engine
) -> None:
    finished: list[int] = []
    server = serve()
    engine = connect(policy, server)
    samples = engine.generate(
        Request(PROMPTS, COUNTS, SEEDS, SAMPLING), lambda row, *_: finished.append(row)
    )
    expected = local.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    assert (samples.token_ids, samples.finish_reasons) == (
        expected.token_ids,
        expected.finish_reasons,
    )
    np.testing.assert_allclose(
        np.concatenate(samples.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    assert sorted(finished) == list(range(24))
    assert (engine.version, engine.prefix_block, engine.max_length) == ("vllm-0.32.0", 16, 512)
    assert 1 < server.does.most_in_flight <= 4


def test_the_metrics_are_of_all_servers_since_the_start(serve: Serve, policy: Policy) -> None:
    """A server that dies counts as far as it was seen."""
    dying, other, silent = serve(), serve(delay=0.05), serve(has_metrics=False)
    engine = connect(policy, dying, other, silent)
    request = Request(PROMPTS, COUNTS, SEEDS, SAMPLING)
    before = [each.does.num_tokens for each in (dying, other)]
    engine.generate(request)
    seen = dying.does.num_tokens
    dying.stop()
    engine.generate(request)
    found = engine.metrics()
    total = seen - before[0] + other.does.num_tokens - before[1]
    assert found["engine/generation_tokens"] == total > 0
    assert found["engine/num_preemptions"] == 0.0
    assert found["engine/generation_tokens_per_second"] == total / engine.meter.seconds
    assert found["engine/kv_cache_usage_perc"] in {n / 8 for n in range(1, 5)}


def test_servers_without_metrics_have_none(serve: Serve, policy: Policy) -> None:
    engine = connect(policy, serve(has_metrics=False))
    engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    assert engine.metrics() == {}


def test_samples_of_a_prompt_go_to_one_server(serve: Serve, policy: Policy) -> None:
    servers = [serve(delay=0.02), serve(delay=0.02)]
    engine = connect(policy, *servers, max_rows=8)
    for server in servers:
        server.does.prompts.clear()
    engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    first, second = (set(server.does.prompts) for server in servers)
    assert first
    assert second
    assert not first & second


def test_a_server_that_dies_gives_its_work_to_the_others(
    serve: Serve, policy: Policy, local: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    dying, other = serve(delay=0.01), serve(delay=0.01)
    engine = connect(policy, dying, other)

    def stop_in_the_middle(row: int, *_: object) -> None:
        finished.append(row)
        if len(finished) == 8:
            dying.stop()

    finished: list[int] = []
    samples = engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING), stop_in_the_middle)
    assert samples.token_ids == local.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING)).token_ids
    assert sorted(finished) == list(range(24))
    assert 0 < dying.does.served < 24
    assert f"{dying.url} is not reachable" in caplog.text


def test_a_server_comes_back_when_it_is_well(serve: Serve, policy: Policy, local: Engine) -> None:
    away = serve(fault=lambda number: 503 if 2 <= number < 6 else None, delay=0.01)
    other = serve(delay=0.2)
    engine = connect(policy, away, other)
    samples = engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    assert samples.token_ids == local.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING)).token_ids
    assert away.does.served > 4


def test_a_server_that_was_not_there_at_first_joins_later(
    serve: Serve, policy: Policy, local: Engine
) -> None:
    late, other = serve(), serve(delay=0.1)
    late.stop()
    engine = connect(policy, late, other)
    late.start()
    samples = engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    assert samples.token_ids == local.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING)).token_ids
    assert late.does.served > 1


def test_a_server_that_hangs_is_left_alone(serve: Serve, policy: Policy, local: Engine) -> None:
    hanging, other = serve(), serve()
    engine = connect(policy, hanging, other, timeout_seconds=2.0)
    hanging.does.delay = 600.0
    samples = engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    assert samples.token_ids == local.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING)).token_ids


def test_when_every_server_is_gone_the_error_names_them_all(serve: Serve, policy: Policy) -> None:
    servers = [serve(), serve()]
    engine = connect(policy, *servers)
    for server in servers:
        server.stop()
    with pytest.raises(ArtifactError) as caught:
        engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))
    assert any(server.url in str(caught.value) for server in servers)
    with pytest.raises(ArtifactError, match="no server responds") as caught:
        connect(policy, *servers)
    assert all(server.url in str(caught.value) for server in servers)


def test_a_completion_that_keeps_failing_is_given_up(serve: Serve, policy: Policy) -> None:
    server = serve(fault=lambda number: 500 if number > 1 else None)
    engine = connect(policy, server, max_rows=1)
    with pytest.raises(ArtifactError, match=rf"{server.url}/completions responded with 500"):
        engine.generate(Request(PROMPTS[:1], [1], [0], SAMPLING))
    assert 2 <= server.does.requests <= 12


def test_what_is_wrong_for_good_is_not_tried_again(serve: Serve, policy: Policy) -> None:
    server = serve(fault=lambda number: 400 if number > 1 else None)
    engine = connect(policy, server, max_rows=1)
    with pytest.raises(
        ArtifactError, match=rf"{server.url}/completions responded with 400: .*told to"
    ):
        engine.generate(Request(PROMPTS[:1], [1], [0], SAMPLING))
    assert server.does.requests == 2


def test_the_key_is_sent_and_never_shown(
    serve: Serve, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve(key="sesame-1")
    with pytest.raises(ArtifactError, match="responded with 401.*OPENAI_API_KEY"):
        connect(policy, server)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-1")
    engine = connect(policy, server)
    server.does.fault = lambda number: 400  # its answer repeats what it was sent
    with pytest.raises(ArtifactError, match=r"Bearer \*\*\*") as caught:
        engine.generate(Request(PROMPTS[:1], [1], [0], SAMPLING))
    assert "sesame" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("behaviour", [{"noise": 0.01}, {"raw_logprobs": True}])
def test_another_policy_is_refused(serve: Serve, policy: Policy, behaviour: dict[str, Any]) -> None:
    server = serve(**behaviour)
    with pytest.raises(
        ArtifactError, match=rf"{server.url} serves .* not the policy {policy.digest}"
    ):
        connect(policy, server)


def test_a_server_that_comes_back_as_another_is_refused(serve: Serve, policy: Policy) -> None:
    server, other = serve(), serve(noise=0.01)
    engine = connect(policy, server)
    server.engine = other.engine
    server.does.fault = lambda number: 503 if number == 3 else None
    with pytest.raises(ArtifactError, match="not the policy"):
        engine.generate(Request(PROMPTS, COUNTS, SEEDS, SAMPLING))


def test_a_server_of_several_models_must_name_the_policy(serve: Serve, policy: Policy) -> None:
    assert connect(policy, serve(names=["other", policy.digest])).generate(
        Request(PROMPTS, COUNTS, SEEDS, SAMPLING)
    )
    with pytest.raises(
        ArtifactError, match=f"serves one, two: start it with --served-model-name {policy.digest}"
    ):
        connect(policy, serve(names=["one", "two"]))


def test_a_server_without_token_ids_is_refused(serve: Serve, policy: Policy) -> None:
    with pytest.raises(ArtifactError, match="returns no token ids"):
        connect(policy, serve(token_ids=False))


def test_weights_are_not_replaced_in_servers_of_others(serve: Serve, policy: Policy) -> None:
    server = serve()
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ArtifactError, match="training replaces the policy's weights"):
        connect(policy, server).set_weights(NamedWeights(model))
    asked = server.does.requests
    with pytest.raises(ArtifactError, match="training replaces the policy's weights"):
        load_engine(dataclasses.replace(ENGINE, name="server", urls=[server.url]), policy, model)
    assert server.does.requests == asked  # refused before anything was asked


def test_urls() -> None:
    assert (
        parse_url("http://127.0.0.1:8000")
        == parse_url("http://127.0.0.1:8000/v1/")
        == "http://127.0.0.1:8000/v1"
    )
    assert parse_url("https://host/some/api") == "https://host/some/api"
    with pytest.raises(ParamsError, match="not a URL like"):
        parse_url("localhost:8000")
    for secret in ("http://me:hunter2@host/v1", "http://host/v1?key=hunter2"):
        with pytest.raises(ParamsError, match="OPENAI_API_KEY") as caught:
            parse_url(secret)
        assert "hunter2" not in str(caught.value)


def test_settings_that_contradict_each_other(policy: Policy) -> None:
    with pytest.raises(ParamsError, match="set one of the two"):
        connect(policy, "http://127.0.0.1:9/v1", num_replicas=2)
    with pytest.raises(ParamsError, match="num_replicas is 0"):
        connect(policy, num_replicas=0)
    assert engine_name(dataclasses.replace(ENGINE, name="auto", urls=["http://host"])) == "server"
    assert engine_name(dataclasses.replace(ENGINE, name="auto", num_replicas=2)) == "server"


def test_chunks_by_hand() -> None:
    assert chunked([3, 0, 5], 2) == [[0, 1], [2], [3, 4], [5, 6], [7]]
    assert chunked([3, 1], 8) == [[0, 1, 2], [3]]


def test_an_unknown_engine_is_named(policy: Policy) -> None:
    with pytest.raises(
        ParamsError, match=f"engine.name is 'trt'; use: {', '.join(registry.names(engines))}"
    ):
        load_engine(dataclasses.replace(ENGINE, name="trt"), policy)


def test_an_engine_without_a_slot_is_refused_and_does_not_wait_forever(policy: Policy) -> None:
    with pytest.raises(ParamsError, match=r"engine\.max_rows is 0; it must be at least 1"):
        load_engine(dataclasses.replace(ENGINE, name="hf", max_rows=0), policy)


@pytest.mark.parametrize("name", ["hf", "vllm", "fake"])
def test_servers_are_not_named_to_an_engine_that_has_none(policy: Policy, name: str) -> None:
    with pytest.raises(
        ParamsError, match=rf"engine.urls and engine.num_replicas .* engine.name is {name}"
    ):
        load_engine(dataclasses.replace(ENGINE, name=name, num_replicas=2), policy)


def test_made_up_completions_are_for_tests(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINNOW_FAKE_ENGINE")
    with pytest.raises(ArtifactError, match="for tests only"):
        load_engine(dataclasses.replace(ENGINE, name="fake"), policy)
