"""vLLM servers that Winnow starts itself on this machine, for `engine.num_replicas`.

Each server listens on a Unix socket in a folder that only this user can enter: other users must not
replace its weights, and no port can collide. Each server has its own GPUs; on a CPU they share the
cores. They stop with the process that started them, even if that process is killed
(`common/processes/guard.py`)."""

import logging
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import tasks
from tasks.common.files import ArtifactError, temporary_folder
from tasks.common.processes.guard import guarded
from tasks.engines.loading import num_trainer_gpus
from tasks.engines.options import Options, as_arguments, checked, own_options
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Endpoint, is_healthy
from tasks.engines.server.logs import new_folder, shorten, tail
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy, torch_device

logger = logging.getLogger(__name__)

START_SECONDS = 900.0  # loading and compiling a large policy takes long
POLL_SECONDS = 0.1
MAX_RESTARTS = 3  # of the server in one place
MAX_FOLDER = 70  # characters: a socket's path has at most 107, vLLM's file name 36
ROOT = Path(tasks.__file__).resolve().parent.parent
# environment variables of a server
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that replace weights
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would put the first thread of every replica on the same core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# variables for the engine in this process, or for other servers
NOT_PASSED_ON = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"}
NOT_PASSED_ON |= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# On a CPU vLLM would start one more process for the model, only to set its number of threads.
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# vLLM would compile one function at the first request, which takes seconds.
EAGER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


class Replica(Protocol):
    """A server that this process started, on this machine or on a cluster."""

    @property
    def endpoint(self) -> Endpoint: ...

    def is_serving(self) -> bool:
        """Return whether the server reports that it is healthy."""
        ...

    def has_ended(self) -> bool: ...

    def was_lost(self) -> bool:
        """Return whether the server's machine died, not only the server."""
        ...

    def log_tail(self) -> str:
        """Return the end of the server's output."""
        ...

    def end(self) -> None:
        """Begin to stop the server, without waiting."""
        ...

    def wait(self) -> None:
        """Wait until the server has exited; call `end` first."""
        ...


@dataclass(frozen=True)
class LocalReplica:
    """A server on this machine: its guard process, its endpoint, and its log."""

    process: "subprocess.Popen[bytes]"
    endpoint: Endpoint
    log: Path

    def is_serving(self) -> bool:
        return is_healthy(self.endpoint)

    def has_ended(self) -> bool:
        shorten(self.log)
        return self.process.poll() is not None

    def was_lost(self) -> bool:
        return False

    def log_tail(self) -> str:
        return tail(self.log)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> None:
        self.process.wait()


class Replicas:
    """`num` servers of a policy. `start(place, attempt)` starts server number `place`, without
    waiting for it. A server that has exited is restarted up to MAX_RESTARTS times. All servers read
    new weights from `folder`. They stop at `close`, or when this object or process ends."""

    def __init__(
        self,
        start: Callable[[int, int], Replica],
        num: int,
        folder: Path,
        files: ExitStack,
    ) -> None:
        self.start, self.num, self.folder = start, num, folder
        self.attempts = [0] * num
        self.replicas: list[Replica] = []
        self.dropped: set[Endpoint] = set()
        self.close = weakref.finalize(self, end, self.replicas, files)
        self.replicas += [start(place, 0) for place in range(num)]
        self.starting = set(range(num))  # places of servers that have not answered yet
        self.deadline = time.monotonic() + START_SECONDS

    def num_starting(self) -> int:
        """Return the number of servers that have not responded yet. A server whose machine died is
        restarted, at most MAX_RESTARTS times. Raise ArtifactError, with the end of the log, if a
        server exited for another reason or too often, or takes longer than START_SECONDS."""
        for place in sorted(self.starting):
            replica = self.replicas[place]
            if replica.is_serving():
                self.starting.remove(place)
            elif replica.has_ended():
                if not replica.was_lost() or self.attempts[place] == MAX_RESTARTS:
                    self.fail(replica, "ended")
                self.revive()
            elif time.monotonic() > self.deadline:
                self.fail(replica, f"did not answer in {START_SECONDS:.0f} s")
        return len(self.starting)

    def fail(self, replica: Replica, what: str) -> NoReturn:
        """Stop all servers, and raise ArtifactError with the end of this server's log."""
        tail = replica.log_tail()
        self.close()
        raise ArtifactError(
            f"a vLLM server that was started here {what}; the end of its log:\n{tail}"
        )

    def revive(self) -> None:
        """Restart servers that have exited, at most MAX_RESTARTS times each, without waiting."""
        for place, replica in enumerate(self.replicas):
            if replica.has_ended() and self.attempts[place] < MAX_RESTARTS:
                self.attempts[place] += 1
                logger.warning(
                    "vLLM server %d has ended; restarting it (%d of at most %d times); the "
                    "end of its log:\n%s",
                    place,
                    self.attempts[place],
                    MAX_RESTARTS,
                    replica.log_tail(),
                )
                replica.end()
                self.replicas[place] = self.start(place, self.attempts[place])

    def serving(self, known: Collection[Endpoint] = ()) -> list[Endpoint]:
        """Return the endpoints of servers that are up. Endpoints in `known` are not probed."""
        return [
            replica.endpoint
            for replica in self.replicas
            if not (replica.endpoint in self.dropped or replica.has_ended())
            and (replica.endpoint in known or replica.is_serving())
        ]

    def wait_for_one(self) -> list[Endpoint]:
        """Wait until at least one server is up, with restarts if necessary, and return all that are
        up. Raise ArtifactError if all have exited too often, or none is up in START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.revive()
            if found := self.serving():
                return found
            is_last = min(self.attempts) == MAX_RESTARTS  # a server may have ended since `revive`
            if is_last and all(replica.has_ended() for replica in self.replicas):
                self.fail(self.replicas[0], f"ended {MAX_RESTARTS + 1} times")
            if time.monotonic() > deadline:
                self.fail(self.replicas[0], f"did not answer in {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def drop(self, endpoint: Endpoint) -> None:
        """Stop a server that must get no more requests. `revive` replaces it."""
        self.dropped.add(endpoint)
        for replica in self.replicas:
            if replica.endpoint == endpoint:
                replica.end()


def local(
    settings: EngineSettings, policy: Policy, num_processes: int = 0, logs: Path | None = None
) -> Replicas:
    """Start `engine.num_replicas` servers on this machine, for a trainer of `num_processes` (0 if
    there is none). Their logs are kept under `logs`, if it is given."""
    devices = choose_devices(settings, num_processes)
    on_gpu = devices[0] is not None
    options = server_options(settings, policy, on_gpu=on_gpu, num_gpus=settings.num_parts)
    with ExitStack() as stack:
        root = stack.enter_context(temporary_folder(None, "winnow"))
        folder = root if logs is None else new_folder(logs)
        files = stack.pop_all()
    environment = server_environment(settings, str(root), on_gpu=on_gpu)

    def start_one(place: int, attempt: int) -> Replica:
        # use a new socket: a restarted server must not be mistaken for the previous one
        name = f"{place}-{attempt}" if attempt else str(place)
        command = serve_command(options, root / f"{name}.sock")
        visible = {} if (device := devices[place]) is None else {"CUDA_VISIBLE_DEVICES": device}
        return start(command, root, name, {**environment, **visible}, folder / f"{name}.log")

    return Replicas(start_one, settings.num_replicas, root, files)


def choose_devices(settings: EngineSettings, num_processes: int = 0) -> Sequence[str | None]:
    """Return the CUDA_VISIBLE_DEVICES of each replica (None on a CPU): the GPUs after the trainer's
    GPUs if there are enough, else the first ones. Raise ArtifactError if there are fewer GPUs than
    the replicas need."""
    device, num_replicas = torch_device(settings.device), settings.num_replicas
    if device.type != "cuda":
        return [None] * num_replicas
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    if settings.num_server_gpus > len(visible):
        parts = f" with {settings.num_parts} GPUs each" if settings.num_parts > 1 else ""
        raise ArtifactError(
            f"engine.num_replicas is {num_replicas}{parts}, but this machine has {len(visible)} "
            "GPUs: lower it"
        )
    first = num_trainer_gpus(settings, num_processes, device, len(visible))
    ends = range(first + settings.num_parts, len(visible) + 1, settings.num_parts)
    return [",".join(visible[end - settings.num_parts : end]) for end in ends][:num_replicas]


def server_options(
    settings: EngineSettings, policy: Policy, *, on_gpu: bool, num_gpus: int
) -> dict[str, Any]:
    """Return the options of a server on `num_gpus` GPUs: those that the engine contract requires,
    and those of `engine.vllm`. The model's name is the policy's digest. Raise ParamsError for
    options that vLLM does not accept."""
    backend = "nccl" if settings.weight_transfer == "nccl" else "file"
    in_layers = num_gpus // settings.vllm.get("data_parallel_size", 1)
    options = own_options(settings, policy, on_gpu=on_gpu) | {
        "served_model_name": policy.digest,
        "max_num_seqs": settings.max_rows + 1,  # the rows in flight, and a probe
        "distributed_executor_backend": "mp" if in_layers > 1 else "uni",
        "tensor_parallel_size": max(num_gpus // settings.num_parts, 1),
        "weight_transfer_config": {"backend": backend},
    }
    if extension := transfer.EXTENSIONS.get(backend):
        options["worker_extension_cls"] = extension
    return checked(options, settings.vllm)


def serve_command(options: Options, path: Path) -> list[str]:
    """Return the command that starts vLLM's server with these options, on the socket `path`."""
    flags = [
        "--enable-scale-out",  # the route that reports the weights behind each token
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
    ]
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, "--uds", str(path), *as_arguments(options), *flags]


def start(
    command: list[str], folder: Path, name: str, environment: dict[str, str], log: Path
) -> LocalReplica:
    """Start one server under a guard in a new session: a signal to this process's group must not
    kill the guard before the guard has stopped the server."""
    with log.open("ab") as output:  # appended to, so that `shorten` may truncate it
        process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    endpoint = Endpoint(f"http://replica-{name}/v1", folder / f"{name}.sock")
    return LocalReplica(process, endpoint, log)


def server_environment(settings: EngineSettings, folder: str, *, on_gpu: bool) -> dict[str, str]:
    """Return a server's environment, derived from this process's. Because vLLM does not remove its
    temporary files, TMPDIR is `folder`, unless that path is too long for sockets."""
    kept = {key: value for key, value in os.environ.items() if key not in NOT_PASSED_ON}
    caches = kept.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        **ENVIRONMENT,
        **(EAGER_ENVIRONMENT if not on_gpu and settings.vllm.get("enforce_eager", True) else {}),
        **({} if on_gpu or settings.num_parts > 1 else CPU_ENVIRONMENT),
        **({"TMPDIR": folder} if len(folder) <= MAX_FOLDER else {}),
        "TORCHINDUCTOR_CACHE_DIR": caches,  # the default would be lost with TMPDIR
        "OMP_NUM_THREADS": str(settings.threads),
        "PYTHONPATH": os.pathsep.join(paths),  # the server imports `weights/extension.py`
    }


def end(replicas: Sequence[Replica], files: ExitStack) -> None:
    """Stop all servers, wait for them, and remove sockets and other temporary files."""
    for replica in replicas:
        replica.end()
    for replica in replicas:
        replica.wait()
    files.close()
