"""vLLM servers on the machines of a cluster, started with the same command as local ones, behind a
gate that requires a key."""

import secrets
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from tasks.common.files import ArtifactError
from tasks.common.processes.guard import guarded
from tasks.engines.cluster.host import ADDRESS, SCRATCH
from tasks.engines.cluster.hosts import HostLostError, Places, RemoteHost
from tasks.engines.cluster.places import check_shared, reserve_places, shared_folder
from tasks.engines.server import gate
from tasks.engines.server.endpoints import Endpoint, is_healthy
from tasks.engines.server.logs import new_folder, shorten, tail
from tasks.engines.server.replicas import (
    Replica,
    Replicas,
    serve_command,
    server_environment,
    server_options,
)
from tasks.engines.settings import Cluster, EngineSettings
from tasks.models.policy import Policy

GATE = Path(gate.__file__)


class RemoteReplica:
    """A server in a place of the cluster. It starts once its host is up. Until it has an address,
    its URL contains `name`. All machines must share `folder`."""

    def __init__(
        self,
        host: RemoteHost,
        folder: Path,
        command: list[str],
        environment: dict[str, str],
        name: str,
        log: Path,
    ) -> None:
        self.host, self.folder, self.log = host, folder, log
        self.command, self.environment = command, environment
        self.endpoint = Endpoint(f"http://{name}/v1", name=name, key=environment[gate.KEY])
        self.is_started = self.has_address = False
        self.lost = ""

    def is_serving(self) -> bool:
        try:
            if not self.is_started:
                if self.host.is_up():
                    check_shared(self.host, self.folder)
                    self.host.call(
                        "start", self.command, self.environment, str(Path.cwd()), is_guarded=True
                    )
                    self.is_started = True
                return False
            # the gate's port is available once the gate listens
            if not self.has_address and (port := self.host.call("read", "port")) is not None:
                url = f"http://{self.host.place().address}:{port}/v1"
                self.endpoint = replace(self.endpoint, url=url)
                self.has_address = True
            return self.has_address and is_healthy(self.endpoint)
        except HostLostError as error:
            self.lost = str(error)
            return False

    def has_ended(self) -> bool:
        if self.lost or not self.is_started:
            return bool(self.lost)
        try:
            progress = self.host.poll()
        except HostLostError as error:
            self.lost = str(error)
            return True
        if progress.output:
            self.keep(progress.output)
        return progress.status is not None

    def keep(self, output: bytes) -> None:
        """Append the next output to the log."""
        with self.log.open("ab") as file:
            file.write(output)
        shorten(self.log)

    def keep_rest(self) -> None:
        """Append all output so far to the log, unless the host is lost."""
        with suppress(ArtifactError):
            while self.is_started and (output := self.host.poll().output):
                self.keep(output)

    def was_lost(self) -> bool:
        return bool(self.lost)

    def log_tail(self) -> str:
        self.keep_rest()
        return self.lost or tail(self.log)

    def end(self) -> None:
        self.keep_rest()
        self.host.begin_to_end()

    def wait(self) -> None:
        self.host.kill()


def on_cluster(
    settings: EngineSettings,
    cluster: Cluster,
    policy: Policy,
    places: Places | None = None,
    first: int = 0,
    logs: Path | None = None,
) -> Replicas:
    """Start `engine.cluster.engines` servers on the machines of the cluster, in `places` from index
    `first` on, or in newly reserved places. Their logs are kept under `logs`, if it is given. Raise
    ArtifactError if the cluster has no room for them. Waiting for a server raises ArtifactError if
    the server's machine cannot read the shared folder."""
    with ExitStack() as stack:
        if places is None:
            places = reserve_places(settings, cluster)
            stack.callback(places.close)
        folder = stack.enter_context(shared_folder(cluster, "weights"))
        is_on_gpu = "GPU" in places.bundles[first]
        num_gpus = cluster.gpus_per_engine if is_on_gpu else 1
        options = server_options(settings, policy, on_gpu=is_on_gpu, num_gpus=num_gpus)
        kept = folder if logs is None else new_folder(logs)
        files = stack.pop_all()
    environment = server_environment(settings, SCRATCH, on_gpu=is_on_gpu)
    serve = serve_command(options, Path(SCRATCH) / "server.sock")
    environment |= {gate.KEY: secrets.token_urlsafe(32)}

    def start_one(place: int, attempt: int) -> Replica:
        host = places.host(first + place)
        listen = (f"{SCRATCH}/server.sock", ADDRESS, f"{SCRATCH}/port")
        command = guarded([sys.executable, "-P", str(GATE), *listen, *serve])
        name = f"engine-{place}-{attempt}"
        return RemoteReplica(host, folder, command, environment, name, kept / f"{name}.log")

    return Replicas(start_one, cluster.engines, folder, files)
