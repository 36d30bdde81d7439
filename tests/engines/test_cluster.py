"""Parts of a cluster, tested without Ray: the host of a process, and the gate of a server. For a
real cluster see `test_ray.py`."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.common.files import ArtifactError, WriteError
from tasks.engines.cluster.host import ADDRESS, PIECE, SCRATCH, Host
from tasks.engines.cluster.places import check_shared, shared_folder
from tasks.engines.cluster.ranks import MAX_RESTARTS, Ended, supervise
from tasks.engines.cluster.servers import RemoteReplica
from tasks.engines.server import gate
from tasks.engines.settings import Cluster
from tasks.engines.weights import nccl
from tests.flows.test_processes import is_gone
from tests.patience import wait_for

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


def test_host_starts_polls_and_interrupts_a_process(
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
    host.interrupt()
    while (progress := host.poll()).status is None or progress.output:
        written += progress.output
    assert progress.status == 7
    assert written.endswith(b"stopped\n")


class OtherHost:
    """A substitute for a host on another machine."""

    def __init__(self, host: Host) -> None:
        self.host, self.poll, self.place = host, host.poll, host.place
        self.begin_to_end = host.end

    def is_up(self) -> bool:
        return True

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.host, method)(*arguments, **named)


def test_log_of_a_remote_server_is_kept_here(host: Host, tmp_path: Path) -> None:
    script = f"print('x' * {3 * PIECE}); print('the reason')"
    far: Any = OtherHost(host)
    command, log = [sys.executable, "-c", script], tmp_path / "log"
    replica = RemoteReplica(far, tmp_path, command, {**os.environ, gate.KEY: "k"}, "engine-0", log)
    assert not replica.is_serving()
    wait_for(replica.has_ended)
    assert replica.log_tail().endswith("x\nthe reason\n")
    replica.end()
    assert log.stat().st_size == 3 * PIECE + len("\nthe reason\n")


def test_host_ends_all_descendants_of_its_process(host: Host, tmp_path: Path) -> None:
    script = "import subprocess; c = subprocess.Popen(['sleep', '60']); print(c.pid); c.wait()"
    command = [sys.executable, "-u", "-c", script]
    host.start(command, dict(os.environ), str(tmp_path), is_guarded=False)
    pid = int(wait_for(lambda: host.poll().output))
    host.end()
    assert is_gone(pid)
    assert host.poll().status == -signal.SIGKILL


def test_folder_that_a_machine_does_not_share_is_refused(host: Host, tmp_path: Path) -> None:
    far: Any = OtherHost(host)
    check_shared(far, tmp_path)
    with pytest.raises(ArtifactError, match=f"cannot read {tmp_path}: engine.cluster needs"):
        check_shared(far, tmp_path / "missing")
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
    """Start a gate before a server that answers every route, and return the URL of the gate."""
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


def test_gate_forwards_requests_with_the_key_only(gated: str) -> None:
    def request(method: str, route: str, key: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, f"{gated}{route}", headers=headers, **body)

    answer = request("POST", "/pause?mode=wait", "the key", content="body")
    assert answer.status_code == 200
    assert answer.json() == {"path": "/pause?mode=wait", "sent": "body", "key": None}
    for key in ("", "another", "the key2", "the ke"):
        assert request("POST", "/update_weights", key).status_code == 401
    for method, route in (("POST", "/collective_rpc"), ("GET", "/pause"), ("GET", "/v1/../x")):
        assert request(method, route, "the key").status_code == 404


def test_gate_forwards_exactly_the_routes_in_use() -> None:
    folder = Path(gate.__file__).parent.parent
    files = [*folder.glob("server/*.py"), *folder.glob("weights/*.py")]
    source = "".join(path.read_text() for path in files)
    routes = set(re.findall(r"root\}(/[a-z_/0-9]+)", source))
    routes |= {f"/v1{route}" for route in re.findall(r"endpoint\.url\}(/[a-z_]+)", source)}
    routes |= {f"/{nccl.LEAVE}", "/init_weight_transfer_engine"}
    assert routes | {"/health"} == {route for _, route in gate.ROUTES}


def test_shared_folder_that_is_not_writable_is_named(tmp_path: Path) -> None:
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
        ([75, 1], [75, 1], False, 1),  # the training's own fault: it would fail again
        ([-9, 1], [-9, 1], True, 1),
        ([-9, 75], [-9], True, 75),
        ([75, None], [75], True, 75),  # a silent rank, which was killed
        ([None], [None], True, 1),
    ],
)
def test_lost_ranks_are_distinguished_from_failed_ones(
    statuses: list[int | None], first: list[int | None], is_lost: bool, status: int
) -> None:
    ended = Ended(statuses, first)
    assert ended.is_lost(75) == is_lost
    assert ended.status == status


@pytest.mark.parametrize(
    ("num_lost", "is_progressing", "status", "num_runs"),
    [
        (MAX_RESTARTS, False, 0, MAX_RESTARTS + 1),
        (100, False, 75, MAX_RESTARTS + 1),
        (20, True, 0, 21),
    ],
)
def test_lost_ranks_restart_as_long_as_they_progress(
    num_lost: int, is_progressing: bool, status: int, num_runs: int
) -> None:
    runs = []

    def run() -> Ended:
        runs.append(None)
        return Ended([0, 0]) if len(runs) > num_lost else Ended([-9, 75], [-9])

    assert supervise(run, 75, lambda: len(runs) if is_progressing else 0) == status
    assert len(runs) == num_runs
