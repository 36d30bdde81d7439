"""Reserved places on the machines of a Ray cluster, and a host in each. No other file imports ray.

No large data goes through Ray: no rollouts, no weights. Every client that reaches Ray's port can
run programs, so a token is required. Every call has a time limit, and a host that does not respond
within this limit counts as lost."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import tasks
from tasks.common.files import ArtifactError
from tasks.engines.cluster.host import Host, Place, Progress

ROOT = Path(tasks.__file__).resolve().parent.parent
NAMESPACE = "winnow"
CONNECT_SECONDS = 10.0
HANDSHAKE_SECONDS = 30.0
CALL_SECONDS = 30.0
POLL_SECONDS = 0.1
HEAD_SECONDS = 5.0  # between two checks of the head
NUM_TRIES = 3
# ray reads these when it is imported
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
# By default, Ray would end this process with its own message one minute after its head has died.
DRIVER = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class HostLostError(ArtifactError):
    """Raised if a host's machine or process has died, or does not respond."""


def import_ray() -> Any:
    """Return the module `ray`. Raise ArtifactError if it is not installed."""
    os.environ.update(ENVIRONMENT)
    try:
        import ray
    except ImportError as error:
        raise ArtifactError(
            "engine.cluster names a Ray cluster, but ray is not installed: install the extra "
            "`ray`, or set engine.cluster to local"
        ) from error
    return ray


def connect(address: str) -> Any:
    """Connect this process to the Ray head at `address`, unless it already is. Return the module
    `ray`. Raise ArtifactError if the head does not respond, rejects the token or accepts any token.

    Separate processes try first, because Ray itself would wait many minutes for a response."""
    ray = import_ray()
    if ray.is_initialized():
        return ray
    check_address(address)
    check_token()
    with Trial(address) as own, Trial(address, {TOKENS[0]: secrets.token_hex(16)}) as made_up:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while not (own.has_answer() and made_up.has_answer()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if own.is_refused():
            raise ArtifactError(
                f"the Ray head at {address} refuses the token in RAY_AUTH_TOKEN (or in the file at "
                "RAY_AUTH_TOKEN_PATH): use the head's token"
            )
        if not own.has_answer():
            raise ArtifactError(
                f"no Ray head responded at {address} in {HANDSHAKE_SECONDS:.0f} s: check that "
                "engine.cluster.ray is its address"
            )
        if own.process.returncode:
            last = (own.output().splitlines() or ["no message"])[-1]
            raise ArtifactError(f"cannot connect to the Ray head at {address}: {last}")
        if not made_up.has_answer():
            raise ArtifactError(
                f"the Ray head at {address} did not respond to a wrong token in "
                f"{HANDSHAKE_SECONDS:.0f} s: run the same command again"
            )
        if made_up.process.poll() == 0:
            raise ArtifactError(
                f"the Ray head at {address} accepts any token: start its cluster with "
                "RAY_AUTH_MODE=token, or every client that reaches its port can run programs"
            )
    for name, value in DRIVER.items():
        os.environ.setdefault(name, value)
    join(ray, address)
    return ray


class Trial:
    """A separate process that tries to connect to a head, with extra environment `variables`."""

    def __init__(self, address: str, variables: Mapping[str, str] | None = None) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tasks.engines.cluster.hosts", address],
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.file.close()

    def output(self) -> str:
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace").strip()

    def is_refused(self) -> bool:
        """Return whether the output reports a rejected token. Ray may still be retrying."""
        return "authtoken" in self.output().lower()

    def has_answer(self) -> bool:
        return self.process.poll() is not None or self.is_refused()


def join(ray: Any, address: str) -> None:
    """Connect, and keep this process's SIGTERM handler, which Ray would replace. Suppress Ray's
    output about dead machines."""
    ray._private.worker.listen_error_messages = lambda *_: None
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def check_address(address: str) -> None:
    """Raise ArtifactError if `address` is not host:port, or no process listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ArtifactError(
            f"engine.cluster.ray is {address!r}; it is the address of a Ray head, like head:6379"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ArtifactError(
            f"nothing listens at {address}, the value of engine.cluster.ray ({error}): start the "
            "Ray head there first"
        ) from error


def check_token() -> None:
    """Raise ArtifactError if no token is set for this process or in Ray's default file."""
    default = Path.home() / ".ray" / "auth_token"
    if not any(os.environ.get(name) for name in TOKENS) and not default.exists():
        raise ArtifactError(
            "a Ray cluster without a token lets every client of its port run programs: start it "
            "with RAY_AUTH_MODE=token, and set RAY_AUTH_TOKEN here to its token"
        )


class RemoteHost:
    """A host in one of the reserved places. It starts in the background."""

    def __init__(self, places: "Places", actor: Any) -> None:
        self.places, self.ray, self.actor = places, places.ray, actor
        self.answer = actor.place.remote()  # in flight until the host is up
        self.was_up = False
        self.ended: Any = None

    def is_up(self) -> bool:
        """Return whether the host has responded. Raise HostLostError if it is lost."""
        done, _ = self.ray.wait([self.answer], timeout=0)
        if done:
            self.take(self.answer)
            self.was_up = True
        return self.was_up

    def place(self) -> Place:
        return cast(Place, self.take(self.answer))

    def poll(self) -> Progress:
        return cast(Progress, self.call("poll"))

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Return the result of a method of the host. Raise HostLostError if the host has died or
        does not respond in CALL_SECONDS, and ArtifactError if the method raises an error."""
        return self.take(getattr(self.actor, method).remote(*arguments, **named))

    def take(self, answer: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(answer, timeout=CALL_SECONDS)
        except errors.GetTimeoutError as error:
            raise HostLostError(f"a machine did not respond in {CALL_SECONDS:.0f} s") from error
        except errors.RayTaskError as error:  # the method raised; `cause` is its own exception
            raise ArtifactError(f"on another machine: {error.cause!r}") from error
        except errors.RayError as error:
            reason = f"a machine or its process died ({type(error).__name__})"
            raise HostLostError(reason) from error

    def begin_to_end(self) -> None:
        """If the host was up, request that it stop its process, and do not wait. Do nothing if this
        process has left the cluster: the host's process then dies without a request."""
        if self.ray.is_initialized() and self.was_up:
            self.ended = self.actor.end.remote()

    def kill(self) -> None:
        """Stop the host's process, then the host."""
        if not self.ray.is_initialized():
            return
        if self.ended is None:
            self.begin_to_end()
        if self.ended is not None:
            with suppress(ArtifactError):
                self.take(self.ended)
        if self.places.has_head():
            self.ray.kill(self.actor, no_restart=True)


class Places:
    """Places that are reserved together, each with its CPUs and GPUs, until the process that
    reserved them ends."""

    def __init__(self, address: str, ray: Any, group: Any, bundles: list[dict[str, float]]) -> None:
        self.address, self.ray, self.group, self.bundles = address, ray, group, bundles
        self.next_check = time.monotonic()
        self.is_lost = False  # whether the head is lost

    def host(self, index: int) -> RemoteHost:
        """Return a new host in a place. If the place's machine died, the host comes up once Ray has
        found another machine. Raise ArtifactError if the Ray head has died."""
        self.check_head()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self.bundles[index]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=index
        )
        made = self.ray.remote(LocalHost).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        return RemoteHost(self, made.remote())

    def check_head_at_intervals(self) -> None:
        """Call `check_head`, at most once per HEAD_SECONDS."""
        if time.monotonic() >= self.next_check:
            self.check_head()
            self.next_check = time.monotonic() + HEAD_SECONDS

    def check_head(self) -> None:
        """Raise ArtifactError if the head has died."""
        if not self.has_head():
            raise ArtifactError(
                f"the Ray head at {self.address} has died: start it, and run the same command again"
            )

    def has_head(self) -> bool:
        """Return whether a process listens at the head's address. Try up to NUM_TRIES times. Once
        False, the result stays False, because requests to a dead head would wait forever."""
        for attempt in range(0 if self.is_lost else NUM_TRIES):
            if attempt:
                time.sleep(1.0)
            with suppress(ArtifactError):
                check_address(self.address)
                return True
        self.is_lost = True
        return False

    def close(self) -> None:
        if self.has_head():
            self.ray.util.remove_placement_group(self.group)


class LocalHost(Host):
    """A host whose address is this machine's address in the Ray cluster."""

    def __init__(self) -> None:
        super().__init__(import_ray().util.get_node_ip_address())


def main() -> None:
    """Try to connect to the address in the arguments, for Trial."""
    join(import_ray(), sys.argv[1])


if __name__ == "__main__":
    main()
