"""What runs on the machines of a cluster, without a cluster: the host of a process, the gate before
a server, and the settings. With a real cluster: `test_ray.py`."""

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tasks.common.files import WriteError
from tasks.common.params import ParamsError, parse
from tasks.engines.cluster.host import ADDRESS, PIECE, SCRATCH, Host
from tasks.engines.cluster.places import shared_folder
from tasks.engines.cluster.ranks import MAX_RESTARTS, Ended, supervise
from tasks.engines.cluster.servers import RemoteReplica
from tasks.engines.devices import sampling_gpus, training_gpus
from tasks.engines.loading import engine_name
from tasks.engines.server import gate
from tasks.engines.settings import Cluster, EngineSettings
from tasks.engines.weights import nccl
from tests.flows.test_processes import is_gone
from tests.patience import wait_for
from tests.policies import ENGINE

CLUSTER = Cluster("head:6379", 2, 1, 1, "data")


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host("127.0.0.1")
    yield host
    host.end()


PROCESS = """
import os, signal, sys, time
def stop(*_):
    print("stopped", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print(sys.argv[1:], os.environ["GIVEN"], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
time.sleep(60)
"""


def test_a_host_starts_shows_and_interrupts_a_process(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray sets it for a place
    environment = {**os.environ, "GIVEN": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-c", PROCESS, f"{SCRATCH}/s", ADDRESS]
    host.start(command, environment, str(tmp_path), is_guarded=False)
    written = b""
    while not written.endswith(b"\n"):
        progress = host.poll()
        assert progress.status is None
        written += progress.output
    arguments = [f"{host.folder}/s", "127.0.0.1"]
    assert written.decode() == f"{arguments} 1 3\n"
    with pytest.raises(RuntimeError, match="already running here"):
        host.start(command, environment, str(tmp_path), is_guarded=False)
    host.interrupt()
    while (progress := host.poll()).status is None or progress.output:
        written += progress.output
    assert progress.status == 7
    assert written.endswith(b"stopped\n")


class Here:
    """A host of this process in the place of one on another machine."""

    def __init__(self, host: Host) -> None:
        self.host, self.poll, self.begin_to_end = host, host.poll, host.end

    def is_up(self) -> bool:
        return True

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.host, method)(*arguments, **named)


def test_the_log_of_a_server_on_another_machine_is_kept_here(host: Host, tmp_path: Path) -> None:
    script = f"print('x' * {3 * PIECE}); print('the reason')"
    here: Any = Here(host)
    shared: Any = SimpleNamespace(check=lambda _: None)
    command, log = [sys.executable, "-c", script], tmp_path / "log"
    replica = RemoteReplica(here, shared, command, {**os.environ, gate.KEY: "k"}, "engine-0", log)
    assert not replica.is_serving()
    wait_for(replica.has_ended)
    assert replica.log_tail().endswith("x\nthe reason\n")
    replica.end()
    assert log.stat().st_size == 3 * PIECE + len("\nthe reason\n")


def test_a_host_ends_all_that_its_process_has_started(host: Host, tmp_path: Path) -> None:
    script = "import subprocess; c = subprocess.Popen(['sleep', '60']); print(c.pid); c.wait()"
    command = [sys.executable, "-u", "-c", script]
    host.start(command, dict(os.environ), str(tmp_path), is_guarded=False)
    pid = int(wait_for(lambda: host.poll().output))
    host.end()
    assert is_gone(pid)
    assert host.poll().status == -signal.SIGKILL


def test_the_files_of_a_host_that_was_killed_are_removed_by_the_next_one(tmp_path: Path) -> None:
    script = """
import os, signal
from tasks.engines.cluster.host import Host
host = Host("127.0.0.1")
print(host.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", script]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found.append(Path(said.stdout.strip()))
    assert not found[0].exists()
    assert found[1].is_dir()


def test_a_host_reads_what_another_machine_wrote(host: Host, tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("this")
    assert host.reads(str(tmp_path / "seen"), "this")
    assert not host.reads(str(tmp_path / "seen"), "that")
    assert not host.reads(str(tmp_path / "missing"), "this")
    assert host.read("port") is None


SERVER = """
import sys
from aiohttp import web

async def answer(request):
    return web.json_response({"path": request.path_qs, "sent": await request.text(),
                              "key": request.headers.get("Authorization")})

app = web.Application()
app.router.add_route("*", "/{path:.*}", answer)
web.run_app(app, path=sys.argv[1], print=None)
"""


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[str]:
    """The URL of a gate before a server that answers every route."""
    socket, port = tmp_path / "s", tmp_path / "port"
    options = [str(socket), "127.0.0.1", str(port)]
    command = [sys.executable, "-P", gate.__file__, *options, sys.executable, "-c", SERVER]
    with subprocess.Popen(
        [*command, str(socket)],
        env={**os.environ, gate.KEY: "the key"},
        start_new_session=True,
    ) as process:
        wait_for(lambda: port.exists() and socket.exists())
        yield f"http://127.0.0.1:{port.read_text()}"
        os.killpg(process.pid, signal.SIGKILL)  # as its guard would


async def ask(method: str, url: str, key: str | None, body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, json=body) as answer,
    ):
        return answer.status, await answer.json()


def test_a_gate_passes_on_what_is_asked_with_the_key(gated: str) -> None:
    def answer(*arguments: Any) -> tuple[int, Any]:
        return asyncio.run(ask(*arguments))

    status, said = answer("POST", f"{gated}/pause?mode=wait", "the key", {"a": 1})
    assert status == 200
    assert said == {"path": "/pause?mode=wait", "sent": '{"a": 1}', "key": None}
    for key in (None, "another", "the key2", "the ke"):
        assert answer("POST", f"{gated}/update_weights", key)[0] == 401
    for method, route in (("POST", "/collective_rpc"), ("GET", "/pause"), ("GET", "/v1/../x")):
        assert answer(method, f"{gated}{route}", "the key")[0] == 404


def test_every_route_that_is_used_passes_the_gate_and_no_other() -> None:
    """Those of vLLM's protocol for new weights, too."""
    folder = Path(gate.__file__).parent.parent
    names = (
        "transfer",
        "endpoints",
        "engine",
        "lending",
        "meter",
        "../weights/files",
        "../weights/nccl",
    )
    source = "".join((folder / "server" / f"{name}.py").read_text() for name in names)
    asked = set(re.findall(r"root\}(/[a-z_/0-9]+)", source))
    asked |= {f"/v1{route}" for route in re.findall(r"endpoint\.url\}(/[a-z_]+)", source)}
    asked |= {f"/{nccl.LEAVE}", "/init_weight_transfer_engine"}
    assert asked | {"/health"} == {route for _, route in gate.ROUTES}


def cluster(**changes: Any) -> EngineSettings:
    settings = {"name": "auto", "cluster": CLUSTER, **changes}
    return dataclasses.replace(ENGINE, **settings)


def test_servers_on_a_cluster_are_the_engine_and_take_no_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert engine_name(cluster()) == "server"
    assert engine_name(cluster(cluster=dataclasses.replace(CLUSTER, engines=0))) != "server"
    settings = cluster(device="cuda")
    assert sampling_gpus(settings) == training_gpus(settings, 2) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "hf"}, "engine.cluster.engines is 1, which are vLLM servers"),
        ({"num_processes": 2}, "leave engine.num_processes and engine.num_replicas at 1"),
        ({"urls": ["http://a/v1"]}, "engine.urls empty"),
        (
            {"name": "server", "cluster": dataclasses.replace(CLUSTER, engines=0)},
            "engine.cluster.engines is 0: raise it",
        ),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        cluster(**changes)


def test_a_cluster_has_a_trainer() -> None:
    with pytest.raises(ParamsError, match=r"engine\.cluster\.trainers is 0"):
        dataclasses.replace(CLUSTER, trainers=0)


def test_a_cluster_is_local_or_has_all_its_keys() -> None:
    values = dataclasses.asdict(ENGINE)
    assert parse(values, EngineSettings, "engine").cluster == "local"
    given = {**values, "name": "server", "cluster": dataclasses.asdict(CLUSTER)}
    assert parse(given, EngineSettings, "engine").cluster == CLUSTER
    with pytest.raises(ParamsError, match="engine.cluster is 'here'; allowed: local"):
        parse({**values, "cluster": "here"}, EngineSettings, "engine")
    with pytest.raises(ParamsError, match="engine.cluster"):
        parse({**values, "cluster": {"ray": "head:6379"}}, EngineSettings, "engine")


def test_a_shared_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = dataclasses.replace(CLUSTER, shared=str(tmp_path / "file" / "x"))
    with pytest.raises(WriteError, match="file/x"), shared_folder(place, "weights"):
        pass
    place = dataclasses.replace(CLUSTER, shared=str(tmp_path / "new"))
    with shared_folder(place, "weights") as folder:
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("statuses", "first", "is_lost", "status"),
    [
        ([0, 0], [], False, 0),
        ([1, 75], [1], False, 1),  # the training's own fault: it would fail again
        ([75, 1], [75, 1], False, 1),
        ([1, None], [1], False, 1),
        ([-9, 1], [-9, 1], True, 1),
        ([-9, 75], [-9], True, 75),
        ([75, None], [75], True, 75),  # a silent one, which was killed
        ([None, 75], [None], True, 75),
        ([None], [None], True, 1),
    ],
)
def test_what_died_starts_again_and_what_failed_does_not(
    statuses: list[int | None], first: list[int | None], is_lost: bool, status: int
) -> None:
    ended = Ended(statuses, first)
    assert ended.is_lost(75) == is_lost
    assert ended.status == status


@pytest.mark.parametrize(
    ("num_lost", "is_progressing", "status", "num_runs"),
    [
        (0, False, 0, 1),
        (MAX_RESTARTS, False, 0, MAX_RESTARTS + 1),
        (100, False, 75, MAX_RESTARTS + 1),
        (20, True, 0, 21),
    ],
)
def test_all_ranks_start_again_while_they_get_further(
    num_lost: int, is_progressing: bool, status: int, num_runs: int
) -> None:
    runs = []

    def run() -> Ended:
        runs.append(None)
        return Ended([0, 0]) if len(runs) > num_lost else Ended([-9, 75], [-9])

    assert supervise(run, 75, lambda: len(runs) if is_progressing else 0) == status
    assert len(runs) == num_runs
