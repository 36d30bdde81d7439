"""vLLM in several processes: each samples separately, on the GPU of its rank."""

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.artifacts import Layout
from tasks.engines.engine import Request
from tasks.engines.loading import load_engine
from tasks.engines.settings import Sampling
from tasks.engines.vllm import executor
from tasks.models.policy import read_policy
from tasks.models.weights import NamedWeights
from tasks.train.learner.ranks import join_ranks
from tests.engines.conftest import load, meetings
from tests.policies import ENGINE, place_policy
from tests.stages import run_together

PROMPTS = [[20, 14, 20, 3], [21, 14, 22, 9]]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=6, seed=0)


def test_executor_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, expected in ((None, "uni"), ("1", "uni"), ("4", "external_launcher")):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size is not None:
            monkeypatch.setenv("WORLD_SIZE", size)
        assert executor() == expected


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
