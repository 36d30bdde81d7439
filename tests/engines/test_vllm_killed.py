"""A killed server loses no rows. This test ends the servers that other tests share, so its file is
the last of those with vLLM."""

import os
import signal
import time

import pytest

from tasks.engines.engine import Request
from tasks.engines.server.replicas import Replicas
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import Servers, scaled
from tests.engines.test_replicas import PROMPTS, SAMPLING, wait_for_end


@pytest.mark.vllm
@pytest.mark.slow
def test_killed_replica_loses_no_rows(
    policy: Policy, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = servers.take(policy)
    assert isinstance(engine.replicas, Replicas)
    request = Request(PROMPTS[:20], [8] * 20, list(range(160)), SAMPLING)
    try:
        first, second = (replica.process.pid for replica in engine.replicas.replicas)
        whole = engine.generate(request)
        finished: list[int] = []

        def kill_in_the_middle(row: int, *_: object) -> None:
            finished.append(row)
            if len(finished) == 50:
                os.killpg(first, signal.SIGKILL)

        killed = engine.generate(request, kill_in_the_middle)
        assert killed.token_ids == whole.token_ids
        assert killed.finish_reasons == whole.finish_reasons
        assert sorted(finished) == list(range(160))
        assert "http://replica-0/v1 is not reachable" in caplog.text
        assert wait_for_end(first)

        engine.set_weights(NamedWeights(scaled(policy, 1.01)))
        assert [endpoint.url for endpoint in engine.endpoints] == ["http://replica-1/v1"]
        new = engine.generate(request)
        assert new.token_ids != whole.token_ids

        # the restarted server gets the weights that it missed
        while len(engine.replicas.serving()) < 2:
            time.sleep(0.1)
        assert engine.generate(request) == new
        assert {endpoint.url for endpoint in engine.endpoints} == {
            "http://replica-0-1/v1",
            "http://replica-1/v1",
        }
        os.killpg(second, signal.SIGKILL)
        assert engine.generate(request) == new
        groups = [replica.process.pid for replica in engine.replicas.replicas]
    finally:
        engine.close()
    assert all(map(wait_for_end, [second, *groups]))
