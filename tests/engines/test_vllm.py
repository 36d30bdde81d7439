"""vLLM in several processes, each on the GPU of its rank, and killed servers. That test ends the
servers that other tests share, so it is the last of those with vLLM."""

import json
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.artifacts import Layout
from tasks.engines.engine import Request
from tasks.engines.loading import load_engine
from tasks.engines.server.replicas import Replicas
from tasks.models.policy import Policy, read_policy
from tasks.models.weights import NamedWeights
from tasks.train.learner.ranks import join_ranks
from tests.engines.conftest import Servers, load, meetings, scaled
from tests.engines.test_replicas import PROMPTS, SAMPLING, wait_for_end
from tests.policies import ENGINE, place_policy
from tests.stages import run_together


def sample(layout: Layout, environment: dict[str, str], num_prompts: int, out: Path) -> None:
    """Write the rank of this process among vLLM's devices, and its samples."""
    os.environ.update(environment)
    join_ranks(torch.device("cpu"), timedelta(minutes=5))
    policy = read_policy(layout)
    model = load(policy.folder)
    engine: Any = load_engine(replace(ENGINE, name="vllm", num_processes=2), policy, model)
    seeds = list(range(2 * num_prompts))
    request = Request(PROMPTS[:num_prompts], [2] * num_prompts, seeds, SAMPLING)
    drawn = engine.generate(request).token_ids
    engine.set_weights(NamedWeights(model))
    (place,) = engine.llm.collective_rpc(lambda worker: worker.local_rank)
    out.write_text(json.dumps([place, drawn, engine.generate(request).token_ids]))


@pytest.mark.vllm
def test_each_process_samples_on_the_device_of_its_rank(qwen: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "data")
    place_policy(qwen, layout, load(qwen))
    outs = [tmp_path / "0.json", tmp_path / "1.json"]
    # different numbers of prompts: neither process may wait for the other
    places = zip(meetings(2), (2, 1), outs, strict=True)
    run_together(sample, [(layout, *place) for place in places])
    (first, drawn, again), (second, others, others_again) = (
        json.loads(out.read_text()) for out in outs
    )
    assert (first, second) == (0, 1)
    assert (drawn, others) == (again, others_again)
    assert others == drawn[:2]


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
