"""Training on a Ray cluster of several nodes: processes die, and the policy is the same as on one
machine. The tests need the extra `ray`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.common.artifacts import Layout
from tests.engines.ray_cluster import RayCluster
from tests.patience import PATIENCE, wait_for
from tests.train.worlds import PARAMS, make_world, outputs

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4] * 4  # some 15 steps
MANY = SIZES * 10  # for a training that does not reach its end


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Start a head with room for one process, and another node."""
    with RayCluster([1, 1]) as cluster:
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
    """`python -m tasks.train` in the folder of `layout`."""

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
        def look() -> object:
            assert self.process.poll() is None, self.words()
            return happens()

        wait_for(look)

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def finish(self) -> str:
        assert self.process.wait(280) == 0, self.words()
        return self.words()


def trainers(layout: Layout) -> dict[int, psutil.Process]:
    found = {}
    for process in left_over(layout):
        with suppress(psutil.Error):
            rank = process.environ().get("RANK")
            if rank is not None and "tasks.train" in process.cmdline():
                found[int(rank)] = process
    return found


def left_over(layout: Layout) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(layout.root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for_none(layout: Layout) -> None:
    """Wait until no process of the training is left."""
    wait_for(lambda: not left_over(layout))


def steps(layout: Layout) -> int:
    found = [int(path.name.split("-")[1]) for path in layout.checkpoints.glob("*/step-*")]
    return max(found, default=0)


def check_outputs(layout: Layout, expected: dict[str, Any]) -> None:
    found = outputs(layout)
    assert found["weights"] == expected["weights"]
    assert found["rollouts"] == expected["rollouts"]
    wait_for_none(layout)


def runs_a_rank(cluster: RayCluster, number: int, layout: Layout) -> bool:
    own = psutil.Process(cluster.nodes[number].pid).children(recursive=True)
    return any(rank in own for rank in trainers(layout).values())


def test_rank_and_head_die_and_the_same_command_continues(guesser: Path, tmp_path: Path) -> None:
    one, root = world(tmp_path / "one", guesser, SIZES * 2, num_processes=2), tmp_path / "cluster"
    Training(one, dict(os.environ)).finish()
    with RayCluster([1, 2]) as cluster:
        layout = world(root, guesser, SIZES * 2, cluster=on(cluster, root, 2, 0))
        training = Training(layout, cluster.environment)
        training.wait_for(lambda: steps(layout) >= 2)
        trainers(layout)[1].kill()
        training.wait_for(lambda: "(1 of at most 3 times)" in training.words())
        before = steps(layout)
        training.wait_for(lambda: steps(layout) > before)
        for rank in trainers(layout).values():
            rank.suspend()  # it must not end before the lost head is noticed
        cluster.kill(0)
        assert training.process.wait(PATIENCE) == 1
        log = training.words()
        assert "rank 1 was killed by signal 9" in log
        message = f"the Ray head at {cluster.address} has died: start it, and run the same command"
        assert log.count(message) == 1
        assert message in log.splitlines()[-1]
        for words in ("Traceback", "GCS", "(raylet)"):
            assert words not in log
        wait_for_none(layout)
    with RayCluster([2]) as cluster:
        values = yaml.safe_load((root / "params.yaml").read_text())
        values["engine"]["cluster"]["ray"] = cluster.address
        (root / "params.yaml").write_text(yaml.safe_dump(values))
        assert "resumed after" in Training(layout, cluster.environment).finish()
        check_outputs(layout, outputs(one))


@pytest.mark.vllm
def test_trainer_machine_and_server_die_and_the_policy_is_the_same(
    guesser: Path, tmp_path: Path
) -> None:
    """The server outlives the trainers."""
    one = world(tmp_path / "one", guesser, name="server")
    Training(one, dict(os.environ)).finish()
    with RayCluster([0, 1, 1, 1]) as cluster:  # one is a spare
        root = tmp_path / "cluster"
        layout = world(root, guesser, name="auto", cluster=on(cluster, root, 1, 1))
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
        assert "rank 0 was killed by signal 9" in log
        assert "restarting it (1 of at most 3 times)" in log
        assert cluster.environment["RAY_AUTH_TOKEN"] not in log
        check_outputs(layout, outputs(one))


def server_of(layout: Layout) -> psutil.Process:
    """Return the process of the only vLLM server, without its guard and its gate."""
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
    resumed = Training(layout, cluster.environment)
    begun = steps(layout)
    resumed.wait_for(lambda: steps(layout) > begun)
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.process.wait(60) == 130, resumed.words()
    assert "interrupted; run the same command again" in resumed.words()  # the rank saved
    assert not (layout.train("r", 0) / "policy").exists()
    wait_for_none(layout)


def refused(address: str, environment: dict[str, str], root: Path, policy: Path) -> Training:
    """Start a training that cannot connect."""
    place = {"ray": address, "trainers": 1, "engines": 0, "gpus_per_engine": 1, "shared": "."}
    return Training(world(root, policy, cluster=place), environment)


def test_failed_connection_is_explained(cluster: RayCluster, guesser: Path, tmp_path: Path) -> None:
    wrong = {**cluster.environment, "RAY_AUTH_TOKEN": "0" * 32}
    with socket.socket() as dead, socket.socket() as silent:
        addresses = [cluster.address]
        for server in (dead, silent):
            server.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{server.getsockname()[1]}")
        silent.listen()
        trainings = [
            refused(address, environment, tmp_path / str(number), guesser)
            for number, (address, environment) in enumerate(
                zip(addresses, (wrong, cluster.environment, cluster.environment), strict=True)
            )
        ]
        assert {training.process.wait(90) for training in trainings} == {1}
    messages = (
        "refuses the token in RAY_AUTH_TOKEN",
        f"nothing listens at {addresses[1]}",
        f"no Ray head responded at {addresses[2]} in 30 s",
    )
    for training, message in zip(trainings, messages, strict=True):
        assert message in training.words()
        assert wrong["RAY_AUTH_TOKEN"] not in training.words()


def test_head_that_accepts_any_token_is_refused(guesser: Path, tmp_path: Path) -> None:
    with RayCluster([1], token=None) as cluster:
        environment = {**cluster.environment, "RAY_AUTH_TOKEN": "0" * 32}
        training = refused(cluster.address, environment, tmp_path, guesser)
        assert training.process.wait(90) == 1
    found = training.words()
    assert f"the Ray head at {cluster.address} accepts any token" in found


def test_request_beyond_the_cluster_is_refused(
    cluster: RayCluster, guesser: Path, tmp_path: Path
) -> None:
    layout = world(tmp_path, guesser, cluster=on(cluster, tmp_path, 9, 0))
    training = Training(layout, cluster.environment)
    assert training.process.wait(90) == 1
    assert "engine.cluster requests 9 CPUs" in training.words()
