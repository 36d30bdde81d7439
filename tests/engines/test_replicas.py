"""Servers that Winnow starts: they share the rows, lose none if one is killed, and end with their
parent."""

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as distributed
from transformers import PreTrainedModel

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError, temporary_folder
from tasks.engines.engine import Engine, Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.replicas import (
    Replicas,
    choose_devices,
    server_environment,
    start,
)
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy, read_policy
from tasks.models.weights import NamedWeights
from tasks.train.learner.ranks import join_ranks
from tests.engines.conftest import (
    SETTINGS,
    Servers,
    load,
    logprob_gaps,
    meetings,
    scale,
    scaled,
)
from tests.engines.serving import StandIn
from tests.patience import PATIENCE, wait_for
from tests.policies import place_policy
from tests.stages import FORKS, run_together

SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=12, seed=0)
PROMPTS = [[20 + i, 14, 20, 3, 32] for i in range(40)]
LONG = Request(PROMPTS[:2], [8] * 2, list(range(16)), dataclasses.replace(SAMPLING, max_tokens=300))


def processes_of(group: int) -> list[psutil.Process]:
    """Return the living processes of a group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_for_end(group: int) -> bool:
    return wait_for(lambda: not processes_of(group))


def largest_gap(samples: Samples, models: dict[int, PreTrainedModel]) -> float:
    """Return the largest |difference| of a token's log-probability to that of its policy."""
    assert samples.versions is not None
    versions_N = np.concatenate(samples.versions)
    gaps_N = {
        version: np.concatenate(logprob_gaps(model, LONG, samples))
        for version, model in models.items()
    }
    return max(float(gaps[versions_N == version].max()) for version, gaps in gaps_N.items())


def swapped_twice(
    engine: ServerEngine, models: list[PreTrainedModel], versions: tuple[int, int, int]
) -> Samples:
    """Return completions that begin with the first policy and continue with the two others."""
    engine.set_weights(NamedWeights(models[0]), versions[0])
    began, done = threading.Event(), threading.Event()

    def swap() -> None:
        for version, model in zip(versions[1:], models[1:], strict=True):
            engine.swap_weights(NamedWeights(model), version)
            time.sleep(0.3)
        done.set()

    def start_swap(*_: object) -> None:
        if not began.is_set():
            began.set()
            threading.Thread(target=swap).start()

    samples = engine.generate(LONG, start_swap)
    assert done.wait(PATIENCE)
    return samples


@pytest.mark.vllm
@pytest.mark.slow
def test_versions_of_tokens_are_those_of_their_policies(policy: Policy, servers: Servers) -> None:
    """On a busy machine, completions may end before the second swap; then others are sampled."""
    engine = servers.of(policy)
    scaled_models = [scaled(policy, factor) for factor in (1.0, 1.3, 1.7)]
    for first in range(0, 100, 10):
        versions = (first, first + 5, first + 6)
        samples = swapped_twice(engine, scaled_models, versions)
        assert samples.versions is not None
        found = [set(tokens) for tokens in samples.versions]
        if set(versions) in found:
            break
    assert set(versions) in found  # one completion has tokens of all three
    assert set().union(*found) == set(versions)
    assert all(tokens == sorted(tokens) for tokens in samples.versions)
    models = dict(zip(versions, scaled_models, strict=True))
    assert largest_gap(samples, models) < 1e-4
    assert max(gaps.max() for gaps in logprob_gaps(scaled_models[0], LONG, samples)) > 0.1
    # later completions are of the last policy
    again = engine.generate(LONG)
    assert again.versions is not None
    assert set(itertools.chain(*again.versions)) == {versions[-1]}
    engine.set_weights(NamedWeights(scaled_models[0]))


def start_and_wait(folder: Path) -> None:
    """Start a command under a guard, write its process group, and wait to be killed."""
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]
    group = start(command, folder, "0", dict(os.environ), folder / "log").process.pid
    (folder / "group").write_text(f"{group}\n")
    time.sleep(600)


def test_replicas_end_with_a_killed_parent(tmp_path: Path) -> None:
    parent, written = FORKS.Process(target=start_and_wait, args=[tmp_path]), tmp_path / "group"
    parent.start()
    wait_for(lambda: written.exists() and written.read_text().endswith("\n"))
    group = int(written.read_text())
    # the guard, its fork, the command, its child
    wait_for(lambda: len(processes_of(group)) == 4)
    parent.kill()
    assert wait_for_end(group)


def test_temporary_files_of_a_server_are_removed() -> None:
    with temporary_folder(None, "winnow") as folder:
        command = [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"]
        environment = server_environment(SETTINGS, str(folder), on_gpu=False)
        replica = start(command, folder, "0", environment, folder / "log")
        replica.wait()
        left = Path(replica.log_tail().strip())
        assert left.is_dir()
        replica.end()
    assert not left.exists()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": False}])
def test_server_with_a_model_that_is_not_compiled_compiles_nothing(
    on_gpu: bool, options: dict[str, bool]
) -> None:
    settings = dataclasses.replace(SETTINGS, vllm=options)
    environment = server_environment(settings, "", on_gpu=on_gpu)
    assert ("TORCHDYNAMO_DISABLE" in environment) == (not on_gpu and not options)


class Slow(StandIn):
    """A server that ends at the second poll after a call of `end`."""

    num_polls = -1

    def __init__(self, place: int, attempt: int) -> None:
        super().__init__(None, f"{place}-{attempt}")

    def is_serving(self) -> bool:
        return self.num_polls < 0

    def has_ended(self) -> bool:
        self.num_polls += self.num_polls >= 0
        return self.num_polls > 1

    def end(self) -> None:
        self.num_polls = 0


def test_server_that_ends_during_a_wait_is_restarted(tmp_path: Path) -> None:
    replicas = Replicas(Slow, 1, tmp_path, ExitStack())
    replicas.drop(replicas.serving()[0])
    assert [each.name for each in replicas.wait_for_one()] == ["0-1"]


def train_beside(layout: Layout, environment: dict[str, str], out: Path) -> None:
    """Write the samples of one of several training processes, before and after new weights."""
    os.environ.update(environment)
    rank = join_ranks(torch.device("cpu"), timedelta(minutes=5)).rank
    policy = read_policy(layout)
    model = load(policy.folder)
    engine = load_engine(dataclasses.replace(SETTINGS, num_replicas=1), policy, model)
    request = Request(PROMPTS[: 2 - rank], [2] * (2 - rank), [1, 2, 3, 4][: 4 - 2 * rank], SAMPLING)
    first = engine.generate(request).token_ids
    engine.set_weights(NamedWeights(scale(model, 1.3)))
    distributed.barrier()
    second = engine.generate(request)
    third = swap_in_the_middle(engine, model)
    out.write_text(json.dumps([first, *map(vars, (second, third))]))
    distributed.barrier()  # the servers end with the first process
    engine.close()


def swap_in_the_middle(engine: Engine, model: PreTrainedModel) -> Samples:
    """Return samples of this process, while all processes swap the weights after a completion has
    ended in each."""
    assert isinstance(engine, ServerEngine)
    engine.set_weights(NamedWeights(model), 1)
    began = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        samples = thread.submit(engine.generate, LONG, lambda *_: began.set())
        assert began.wait(60.0)
        scale(model, 1.3)
        distributed.barrier()
        engine.swap_weights(NamedWeights(model), 2)
        return samples.result()


@pytest.mark.vllm
def test_training_processes_share_the_servers_of_the_first(qwen: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "data")
    model = load(qwen)
    place_policy(qwen, layout, model)
    outs = [tmp_path / "0.json", tmp_path / "1.json"]
    run_together(train_beside, [(layout, *each) for each in zip(meetings(2), outs, strict=True)])
    (first, *sampled), (others, *others_sampled) = (json.loads(out.read_text()) for out in outs)
    (second, third), (others_second, others_third) = (
        [Samples(**values) for values in each] for each in (sampled, others_sampled)
    )
    assert others == first[:2]
    assert others_second.token_ids == second.token_ids[:2] != others
    request = Request(PROMPTS[:2], [2] * 2, [1, 2, 3, 4], SAMPLING)
    for version in (1, 2):
        scale(model, 1.3)
        if version == 1:
            assert max(gaps.max() for gaps in logprob_gaps(model, request, second)) < 1e-4
        for samples in (third, others_third):
            assert samples.versions is not None
            versions_N = np.concatenate(samples.versions)
            gaps_N = np.concatenate(logprob_gaps(model, LONG, samples))
            assert set(versions_N.tolist()) == {1, 2}
            assert gaps_N[versions_N == version].max() < 1e-4 < gaps_N[versions_N != version].max()


def test_gpus_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    settings = dataclasses.replace(SETTINGS, device="cuda", num_replicas=2)
    assert choose_devices(settings) == ["2", "5"]
    assert choose_devices(settings, 1) == ["5", "7"]
    assert choose_devices(settings, 2) == ["2", "5"]  # too few: trainer and replicas share them
    with pytest.raises(ArtifactError, match="num_replicas is 4, but this machine has 3 GPUs"):
        choose_devices(dataclasses.replace(settings, num_replicas=4))
    assert choose_devices(dataclasses.replace(settings, device="cpu"), 1) == [None, None]
    # each part of a replica needs a GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7,8,9")
    settings = dataclasses.replace(settings, vllm={"tensor_parallel_size": 2})
    assert choose_devices(settings) == ["2,5", "7,8"]
    assert choose_devices(settings, 1) == ["5,7", "8,9"]
    with pytest.raises(ArtifactError, match="num_replicas is 3 with 2 GPUs each, but this machine"):
        choose_devices(dataclasses.replace(settings, num_replicas=3))
