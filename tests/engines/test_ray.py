"""Training on a Ray cluster of several nodes: the same policy as on one machine, whatever dies.
Needs the extra `ray`; without it nothing here runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.common.artifacts import Layout
from tests.engines.ray_cluster import RayCluster
from tests.patience import PATIENCE
from tests.train.worlds import PARAMS, make_world, outputs

pytest.importorskip("ray")

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4] * 4
MANY = SIZES * 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head, a node with room for one process, and one more to take its place."""
    with RayCluster([1, 1, 1]) as cluster:
        yield cluster


def world(root: Path, policy: Path, sizes: Sequence[int] = SIZES, **engine: Any) -> Layout:
    layout = make_world(root, policy, sizes)
    values = {
        **PARAMS,
        "engine": {**PARAMS["engine"], **engine},
        "checkpoint": {"every_seconds": 0.0, "keep": 2},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    return layout


def on(cluster: RayCluster, root: Path, trainers: int, engines: int) -> dict[str, Any]:
    return {
        "ray": cluster.address,
        "trainers": trainers,
        "engines": engines,
        "gpus_per_engine": 1,
        "shared": str(root),
    }


class Training:
    """`python -m tasks.train` in the world of `layout`."""

    def __init__(self, layout: Layout, environment: dict[str, str]) -> None:
        self.log = layout.root / "log"
        options = ["--params", "params.yaml", "--data", ".", "--recipe", "r", "--seed", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.train", *options],
                cwd=layout.root,
                env={**environment, "PYTHONPATH": os.getcwd()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, happens: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happens():
            assert self.process.poll() is None, self.words()
            assert time.monotonic() < deadline, self.words()
            time.sleep(0.02)

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def finish(self) -> str:
        assert self.process.wait(280) == 0, self.words()
        return self.words()


def trainers(layout: Layout) -> dict[int, psutil.Process]:
    """The ranks of the training in this world."""
    found = {}
    for process in psutil.process_iter():
        try:
            rank = process.environ().get("RANK")
            is_here = process.cwd() == str(layout.root) and "tasks.train" in process.cmdline()
            if is_here and rank is not None:
                found[int(rank)] = process
        except psutil.Error:
            continue
    return found


def left_over(layout: Layout) -> list[psutil.Process]:
    """Every process that works in this world."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(layout.root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_none(layout: Layout) -> None:
    """No process of the training outlives it for long."""
    deadline = time.monotonic() + PATIENCE
    while left := left_over(layout):
        assert time.monotonic() < deadline, [process.cmdline() for process in left]
        time.sleep(0.1)


def steps(layout: Layout) -> int:
    """The newest checkpoint's."""
    found = [int(path.name.split("-")[1]) for path in layout.checkpoints.glob("*/step-*")]
    return max(found, default=0)


def test_a_rank_and_a_machine_die_and_the_policy_is_the_same(
    cluster: RayCluster, guesser: Path, tmp_path: Path
) -> None:
    sizes = SIZES * 2
    one = world(tmp_path / "one", guesser, sizes, num_processes=2)
    alone = Training(one, dict(os.environ))
    alone.finish()
    root = tmp_path / "cluster"
    layout = world(root, guesser, sizes, cluster=on(cluster, root, 2, 0))
    training = Training(layout, cluster.environment)
    training.wait_for(lambda: steps(layout) >= 2)
    trainers(layout)[1].kill()
    training.wait_for(lambda: "(1 of at most 3 times)" in training.words())
    before = steps(layout)
    training.wait_for(lambda: steps(layout) > before)
    others = [number for number in (1, 2) if runs_a_rank(cluster, number, layout)]
    cluster.kill(others[0])
    log = training.finish()
    assert "rank 1 was killed by signal 9" in log
    assert "(2 of at most 3 times)" in log
    expected, found = outputs(one), outputs(layout)
    assert found["weights"] == expected["weights"]
    assert found["rollouts"] == expected["rollouts"]
    wait_for_none(layout)


def runs_a_rank(cluster: RayCluster, number: int, layout: Layout) -> bool:
    own = psutil.Process(cluster.nodes[number].pid).children(recursive=True)
    return any(rank in own for rank in trainers(layout).values())


def test_the_head_dies_and_the_same_command_goes_on(guesser: Path, tmp_path: Path) -> None:
    sizes = SIZES * 2
    one = world(tmp_path / "one", guesser, sizes, num_processes=2)
    Training(one, dict(os.environ)).finish()
    root = tmp_path / "cluster"
    with RayCluster([1, 2]) as cluster:
        layout = world(root, guesser, sizes, cluster=on(cluster, root, 2, 0))
        training = Training(layout, cluster.environment)
        training.wait_for(lambda: steps(layout) >= 2)
        for rank in trainers(layout).values():
            rank.suspend()  # they would have ended before the head is missed
        cluster.kill(0)
        assert training.process.wait(PATIENCE) == 1
        log = training.words()
        said = f"the Ray head at {cluster.address} has died: start it, and run the same command"
        assert log.count(said) == 1
        assert said in log.splitlines()[-1]
        for words in ("Traceback", "GCS", "(raylet)"):
            assert words not in log
        wait_for_none(layout)
    with RayCluster([2]) as cluster:
        values = yaml.safe_load((root / "params.yaml").read_text())
        values["engine"]["cluster"]["ray"] = cluster.address
        (root / "params.yaml").write_text(yaml.safe_dump(values))
        assert "resumed after" in Training(layout, cluster.environment).finish()
        wait_for_none(layout)
    expected, found = outputs(one), outputs(layout)
    assert found["weights"] == expected["weights"]
    assert found["rollouts"] == expected["rollouts"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_trainer_a_machine_and_a_server_die_and_the_policy_is_the_same(
    guesser: Path, tmp_path: Path
) -> None:
    """The server outlives the trainers."""
    sizes = SIZES * 4
    one = world(tmp_path / "one", guesser, sizes, name="server", num_processes=2)
    alone = Training(one, dict(os.environ))
    alone.finish()
    with RayCluster([1, 1, 1, 1]) as cluster:  # one is a spare
        root = tmp_path / "cluster"
        layout = world(root, guesser, sizes, name="auto", cluster=on(cluster, root, 2, 1))
        training = Training(layout, cluster.environment)
        training.wait_for(lambda: steps(layout) >= 2)
        before = server_of(layout)

        def goes_on(num_restarts: int) -> None:
            words = f"({num_restarts} of at most 3 times)"
            training.wait_for(lambda: words in training.words())
            begun = steps(layout)
            training.wait_for(lambda: steps(layout) > begun)
            assert server_of(layout) == before

        trainers(layout)[0].kill()
        goes_on(1)
        cluster.kill(next(n for n in (1, 2, 3) if runs_a_rank(cluster, n, layout)))
        goes_on(2)
        before.kill()
        log = training.finish()
        assert "restarting it (1 of at most 3 times)" in log
        assert cluster.environment["RAY_AUTH_TOKEN"] not in log
        wait_for_none(layout)
    expected, found = outputs(one), outputs(layout)
    assert found["rollouts"] == expected["rollouts"]
    assert found["weights"] == expected["weights"]


def server_of(layout: Layout) -> psutil.Process:
    """The process of the only vLLM server in this world, which is not its guard, nor its gate."""
    module = "vllm.entrypoints.openai.api_server"
    (server,) = [p for p in left_over(layout) if p.cmdline()[1:3] == ["-m", module]]
    return server


def test_all_processes_end_with_the_command(
    cluster: RayCluster, guesser: Path, tmp_path: Path
) -> None:
    layout = world(tmp_path, guesser, MANY, cluster=on(cluster, tmp_path, 1, 0))
    training = Training(layout, cluster.environment)
    training.wait_for(lambda: steps(layout) >= 1)
    training.process.send_signal(signal.SIGKILL)
    wait_for_none(layout)
    again = Training(layout, cluster.environment)
    begun = steps(layout)
    again.wait_for(lambda: steps(layout) > begun)
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(60) == 130, again.words()
    assert "interrupted; run the same command again" in again.words()  # the rank saved
    assert not (layout.train("r", 0) / "policy").exists()
    wait_for_none(layout)


def refusal(address: str, environment: dict[str, str], root: Path, policy: Path) -> str:
    """What a training says that cannot connect."""
    place = {"ray": address, "trainers": 1, "engines": 0, "gpus_per_engine": 1, "shared": "."}
    layout = world(root, policy, cluster=place)
    began = time.monotonic()
    training = Training(layout, environment)
    assert training.process.wait(90) == 1
    assert time.monotonic() - began < 60
    return training.words()


def test_what_is_no_ray_head_is_named_within_a_minute(
    cluster: RayCluster, guesser: Path, tmp_path: Path
) -> None:
    wrong = {**cluster.environment, "RAY_AUTH_TOKEN": "0" * 32}
    said = refusal(cluster.address, wrong, tmp_path / "wrong", guesser)
    assert "refuses the token in RAY_AUTH_TOKEN" in said
    assert wrong["RAY_AUTH_TOKEN"] not in said
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = refusal(address, cluster.environment, tmp_path / "dead", guesser)
        assert f"nothing listens at {address}" in said
        silent.listen()
        said = refusal(address, cluster.environment, tmp_path / "silent", guesser)
        assert f"no Ray head responded at {address} in 30 s" in said


def test_a_head_that_takes_any_token_is_refused(guesser: Path, tmp_path: Path) -> None:
    with RayCluster([1], token=None) as cluster:
        environment = {**cluster.environment, "RAY_AUTH_TOKEN": "0" * 32}
        said = refusal(cluster.address, environment, tmp_path, guesser)
    assert f"the Ray head at {cluster.address} accepts any token" in said


def test_more_than_the_cluster_has_is_refused(
    cluster: RayCluster, guesser: Path, tmp_path: Path
) -> None:
    layout = world(tmp_path, guesser, cluster=on(cluster, tmp_path, 9, 0))
    training = Training(layout, cluster.environment)
    assert training.process.wait(90) == 1
    assert "engine.cluster requests 9 CPUs" in training.words()
