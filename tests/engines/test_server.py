"""The engine `server` with servers that fail, recover, or serve something else."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.engines.loading import load_engine
from tasks.engines.server.endpoints import Connection, Endpoint
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.identity import Identity
from tasks.engines.settings import Sampling, parse_url
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import load, scaled
from tests.engines.serving import Server
from tests.policies import ENGINE

SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=6, seed=0)
PROMPTS = [[20, 14, 20, 3, 32], [21, 14, 22], [40, 41, 42, 43], [50]]
REQUEST = Request(PROMPTS, [6] * 4, list(range(24)), SAMPLING)
ONE = Request(PROMPTS[:1], [1], [0], SAMPLING)

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def local(policy: Policy) -> Samples:
    return load_engine(ENGINE, policy).generate(REQUEST)


@pytest.fixture
def serve(policy: Policy) -> Iterator[Serve]:
    """Start a server of the policy, or of one whose weights differ by `noise`."""
    with ExitStack() as stack:

        def start(names: list[str] | None = None, noise: float = 0.0, **behaviour: Any) -> Server:
            engine = HfEngine(scaled(policy, 1.0 + noise), [1], 8, 512)
            return stack.enter_context(Server(engine, names or [policy.digest], **behaviour))

        yield start


def connect(policy: Policy, *servers: Server | str, **settings: Any) -> ServerEngine:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    chosen = dataclasses.replace(ENGINE, name="server", urls=urls, **{"max_rows": 4, **settings})
    engine = load_engine(chosen, policy)
    assert isinstance(engine, ServerEngine)
    return engine


def test_samples_are_those_of_the_engine_behind_the_servers(
    serve: Serve, policy: Policy, local: Samples
) -> None:
    finished: list[int] = []
    servers = [serve(delay=0.02), serve(delay=0.02)]
    engine = connect(policy, *servers, max_rows=8)
    for server in servers:
        server.does.prompts.clear()
    samples = engine.generate(REQUEST, lambda row, *_: finished.append(row))
    assert samples.token_ids == local.token_ids
    assert samples.finish_reasons == local.finish_reasons
    np.testing.assert_allclose(
        np.concatenate(samples.logprobs), np.concatenate(local.logprobs), atol=1e-5
    )
    assert sorted(finished) == list(range(24))
    assert (engine.version, engine.prefix_block, engine.max_length) == ("vllm-0.32.0", 16, 512)
    assert all(1 < server.does.most_in_flight <= 8 for server in servers)
    # all samples of a prompt go to one server
    first, second = (set(server.does.prompts) for server in servers)
    assert not first & second


def test_metrics_sum_over_all_servers_since_the_start(serve: Serve, policy: Policy) -> None:
    """A server that dies counts up to its last reading, one that restarts from zero again."""
    dying, other, silent = serve(), serve(delay=0.05), serve(has_metrics=False)
    engine = connect(policy, dying, other, silent)
    before = [each.does.num_tokens for each in (dying, other)]
    engine.generate(REQUEST)
    seen = dying.does.num_tokens
    dying.stop()
    engine.generate(REQUEST)
    total = seen - before[0] + other.does.num_tokens - before[1]
    other.does.num_tokens = 0  # its second engine continues to report 1,000
    engine.generate(ONE)
    total += other.does.num_tokens + 1000
    found = engine.metrics()
    assert found["engine/generation_tokens"] == total > 0
    assert found["engine/num_preemptions"] == 0.0
    assert found["engine/generation_tokens_per_second"] == total / engine.meter.seconds
    assert found["engine/kv_cache_usage_perc"] in {n / 8 for n in range(1, 5)}


def test_others_take_the_rows_of_a_server_that_dies(
    serve: Serve, policy: Policy, local: Samples, caplog: pytest.LogCaptureFixture
) -> None:
    dying, other = serve(delay=0.01), serve(delay=0.01)
    engine = connect(policy, dying, other)

    def stop_in_the_middle(row: int, *_: object) -> None:
        finished.append(row)
        if len(finished) == 8:
            dying.stop()

    finished: list[int] = []
    assert engine.generate(REQUEST, stop_in_the_middle).token_ids == local.token_ids
    assert sorted(finished) == list(range(24))
    assert 0 < dying.does.served < 24
    assert f"{dying.url} is not reachable" in caplog.text


def test_server_that_recovers_gets_rows_again(serve: Serve, policy: Policy, local: Samples) -> None:
    away = serve(fault=lambda number: 503 if 2 <= number < 6 else None, delay=0.01)
    other = serve(delay=0.2)
    engine = connect(policy, away, other)
    assert engine.generate(REQUEST).token_ids == local.token_ids
    assert away.does.served > 4


def test_server_that_was_down_at_first_joins_later(
    serve: Serve, policy: Policy, local: Samples
) -> None:
    late, other = serve(), serve(delay=0.1)
    late.stop()
    engine = connect(policy, late, other)
    late.start()
    assert engine.generate(REQUEST).token_ids == local.token_ids
    assert late.does.served > 1


@pytest.mark.parametrize(
    ("trouble", "seconds", "message"),
    [
        ({"delay": 600.0}, 2.0, r"is not reachable \(no response in time\)"),
        ({"hangs": True}, 600.0, "sent no heartbeat for 1.5 s; other servers take its rows"),
    ],
)
def test_others_take_the_rows_of_a_server_that_does_not_answer(
    trouble: dict[str, Any],
    seconds: float,
    message: str,
    serve: Serve,
    policy: Policy,
    local: Samples,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hanging, other = serve(has_metrics=False), serve(has_metrics=False)
    engine = connect(policy, hanging, other, timeout_seconds=seconds)
    engine.beat_seconds = 0.5  # type: ignore[misc]
    vars(hanging.does).update(trouble)
    assert engine.generate(REQUEST).token_ids == local.token_ids
    assert re.search(f"{hanging.url} {message}", caplog.text)
    assert engine.metrics() == {}  # the servers have none


def test_error_names_all_servers_if_none_answers(serve: Serve, policy: Policy) -> None:
    servers = [serve(), serve()]
    engine = connect(policy, *servers)
    for server in servers:
        server.stop()
    with pytest.raises(ArtifactError) as caught:
        engine.generate(REQUEST)
    assert any(server.url in str(caught.value) for server in servers)
    with pytest.raises(ArtifactError, match="no server responds") as caught:
        connect(policy, *servers)
    assert all(server.url in str(caught.value) for server in servers)


@pytest.mark.parametrize(("status", "fewest", "most"), [(500, 3, 12), (400, 2, 2)])
def test_only_temporary_failures_are_retried(
    status: int, fewest: int, most: int, serve: Serve, policy: Policy
) -> None:
    server = serve(fault=lambda number: status if number > 1 else None)
    engine = connect(policy, server, max_rows=1)
    with pytest.raises(ArtifactError, match=rf"{server.url}/completions responded with {status}"):
        engine.generate(ONE)
    assert fewest <= server.does.requests <= most


def test_key_is_sent_and_never_shown(
    serve: Serve, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve(key="sesame-1")
    with pytest.raises(ArtifactError, match="responded with 401.*OPENAI_API_KEY"):
        connect(policy, server)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-1")
    engine = connect(policy, server)
    server.does.fault = lambda number: 400  # its answer repeats the request
    with pytest.raises(ArtifactError, match=r"Bearer \*\*\*") as caught:
        engine.generate(ONE)
    assert "sesame" not in str(caught.value) + caplog.text


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"noise": 0.01}, "serves .* not the policy {}"),
        ({"raw_logprobs": True}, "serves .* not the policy {}"),
        ({"first_token": 1000}, "serves .* not the policy {}"),
        ({"names": ["one", "two"]}, "serves one, two: start it with --served-model-name {}"),
        ({"first_token": None}, "returns no token ids"),
    ],
)
def test_server_of_something_else_is_refused(
    serve: Serve, policy: Policy, behaviour: dict[str, Any], message: str
) -> None:
    server = serve(**behaviour)
    with pytest.raises(ArtifactError, match=f"{server.url} {message.format(policy.digest)}"):
        connect(policy, server)


def test_a_temperature_that_vllm_would_not_use_is_refused(serve: Serve, policy: Policy) -> None:
    engine = connect(policy, serve())
    for value in (0.004, 2.5):
        sampling = dataclasses.replace(SAMPLING, temperature=value)
        with pytest.raises(ArtifactError, match=f"temperature is {value}, but vLLM supports 0"):
            engine.generate(dataclasses.replace(ONE, sampling=sampling))
    other = connect(policy, serve(fingerprint="fp_1"))  # vLLM's limits are not those of others
    assert other.generate(dataclasses.replace(ONE, sampling=sampling)).token_ids


def test_the_probe_has_only_tokens_of_the_policy(serve: Serve, policy: Policy) -> None:
    server = serve()
    small = dataclasses.replace(policy, vocab_size=20)
    asyncio.run(asked(Identity(small, "float32", trusted=True), server.url))
    assert server.does.prompts == [(3, 10, 17, 4, 11, 18, 5, 12)]


async def asked(identity: Identity, url: str) -> None:
    async with Connection(Endpoint(parse_url(url)), 9.0) as connection:
        await identity.check(connection, "")


def test_server_of_several_models_may_name_the_policy(serve: Serve, policy: Policy) -> None:
    assert connect(policy, serve(names=["other", policy.digest])).generate(ONE)


def test_server_that_returns_with_another_policy_is_refused(serve: Serve, policy: Policy) -> None:
    server, other = serve(), serve(noise=0.01)
    engine = connect(policy, server)
    server.engine = other.engine
    server.does.fault = lambda number: 503 if number == 3 else None
    with pytest.raises(ArtifactError, match="not the policy"):
        engine.generate(REQUEST)


def test_weights_of_servers_under_urls_are_not_replaced(serve: Serve, policy: Policy) -> None:
    server, model = serve(), load(policy.folder)
    with pytest.raises(ArtifactError, match="training replaces the policy's weights"):
        connect(policy, server).set_weights(NamedWeights(model))
    requests = server.does.requests
    with pytest.raises(ArtifactError, match="training replaces the policy's weights"):
        load_engine(dataclasses.replace(ENGINE, name="server", urls=[server.url]), policy, model)
    assert server.does.requests == requests


def test_urls() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/"):
        assert parse_url(url) == "http://127.0.0.1:8000/v1"
    assert parse_url("https://host/some/api") == "https://host/some/api"
    for url in ("localhost:8000", "http://[::1"):
        with pytest.raises(ParamsError, match="an entry of engine.urls is not a URL like"):
            parse_url(url)
    for secret in ("http://me:hunter2@host/v1", "http://host/v1?key=hunter2"):
        with pytest.raises(ParamsError, match="OPENAI_API_KEY") as caught:
            parse_url(secret)
        assert "hunter2" not in str(caught.value)
