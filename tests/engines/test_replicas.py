"""Servers that Winnow starts: they sample for all trainers, end with their parent and keep logs."""

import dataclasses
import json
import os
import sys
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
from tasks.engines.engine import Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.logs import MAX_BYTES, MAX_STARTS, new_folder, shorten, tail
from tasks.engines.server.replicas import (
    Replicas,
    choose_devices,
    server_environment,
    start,
)
from tasks.engines.settings import Sampling
from tasks.engines.trainers import gather
from tasks.models.policy import Policy, read_policy
from tasks.models.weights import NamedWeights
from tasks.train.learner.ranks import join_ranks
from tests.engines.conftest import (
    REQUEST,
    SETTINGS,
    Servers,
    load,
    logprob_gaps,
    meetings,
    scale,
    scaled,
)
from tests.engines.serving import StandIn
from tests.patience import wait_for
from tests.policies import place_policy
from tests.stages import FORKS, run_together

SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=12, seed=0)
PROMPTS = [[20 + i, 14, 20, 3, 32] for i in range(40)]
LONG = Request(PROMPTS[:2], [8] * 2, list(range(16)), dataclasses.replace(SAMPLING, max_tokens=300))
FACTORS = (1.0, 1.3, 1.7)  # of the weights of three policies


def processes_of(group: int) -> list[psutil.Process]:
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


def swapped_in_flight(engine: ServerEngine, models: list[PreTrainedModel]) -> Samples:
    """Return completions during which all processes swap the policies again and again. Version V is
    of `models[V % 3]`. One completion at least has tokens of three policies in each process."""
    for begun in range(0, 3000, 300):  # completions may end before the second swap
        version = begun
        engine.set_weights(NamedWeights(models[0]), version)
        with ThreadPoolExecutor(1) as thread:
            sampled = thread.submit(engine.generate, LONG)
            while not all(gather(sampled.done())):
                version += 1
                engine.swap_weights(NamedWeights(models[version % 3]), version)
        samples = sampled.result()
        assert samples.versions is not None
        if all(gather(any(len({v % 3 for v in tokens}) > 2 for tokens in samples.versions))):
            return samples
    raise AssertionError("no completion has tokens of three policies")


def check_versions(samples: Samples, models: list[PreTrainedModel]) -> None:
    """Check that each token's log-probability is of the model of its version, not of another."""
    assert samples.versions is not None
    assert all(tokens == sorted(tokens) for tokens in samples.versions)
    places_N = np.concatenate(samples.versions) % 3
    for place, model in enumerate(models):
        gaps_N = np.concatenate(logprob_gaps(model, LONG, samples))
        assert gaps_N[places_N == place].max() < 1e-4
        assert gaps_N[places_N != place].max() > 0.1


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

    def __init__(self, place: int, attempt: int) -> None:
        super().__init__(None, f"{place}-{attempt}")
        self.is_gone, self.num_polls = False, 0

    def has_ended(self) -> bool:
        self.num_polls += self.is_gone
        return self.num_polls > 1


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
    assert isinstance(engine, ServerEngine)
    request = Request(PROMPTS[: 2 - rank], [2] * (2 - rank), [1, 2, 3, 4][: 4 - 2 * rank], SAMPLING)
    first = engine.generate(request).token_ids
    engine.set_weights(NamedWeights(scale(model, 1.3)))
    distributed.barrier()
    second = engine.generate(request)
    third = swapped_in_flight(engine, [scaled(policy, factor) for factor in FACTORS])
    out.write_text(json.dumps([first, *map(vars, (second, third))]))
    distributed.barrier()  # the servers end with the first process
    engine.close()


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
    gaps = logprob_gaps(scale(model, 1.3), request, second)
    assert max(gap.max() for gap in gaps) < 1e-4
    for samples in (third, others_third):
        check_versions(samples, [scaled(read_policy(layout), factor) for factor in FACTORS])


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


def test_logs_of_the_newest_starts_are_kept(tmp_path: Path) -> None:
    for number in range(1, MAX_STARTS + 3):
        (new_folder(tmp_path) / "0.log").write_text(str(number))
    kept = {int(path.parent.name): path.read_text() for path in tmp_path.glob("*/0.log")}
    assert kept == {number: str(number) for number in range(3, MAX_STARTS + 3)}


def test_long_log_keeps_its_newer_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as server:
        server.write(b"old\n" * (MAX_BYTES // 4))
        shorten(log)
        assert log.stat().st_size == MAX_BYTES
        server.write(b"new\n")
        shorten(log)
        server.write(b"newer\n")
    assert log.stat().st_size == MAX_BYTES // 2 + len("newer\n")
    assert tail(log).endswith("old\nnew\nnewer\n")


@pytest.mark.vllm
def test_servers_write_logs_and_metrics(policy: Policy, servers: Servers) -> None:
    engine = servers.of(policy)
    before = engine.metrics()
    samples = engine.generate(REQUEST)
    after = engine.metrics()
    num_tokens = sum(map(len, samples.token_ids))
    counted = "engine/generation_tokens"
    assert after[counted] - before.get(counted, 0.0) >= num_tokens  # probes have tokens as well
    assert after["engine/generation_tokens_per_second"] > 0.0
    preempted = "engine/num_preemptions"  # updates in flight preempt rows
    assert after[preempted] == before.get(preempted, 0.0)
    newest = max(servers.logs.iterdir(), key=lambda path: int(path.name))
    for name in ("0.log", "1.log"):
        assert "Application startup complete" in (newest / name).read_text()
