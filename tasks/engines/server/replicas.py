"""vLLM servers that Winnow starts itself on this machine, for `engine.num_replicas`.

Each listens on a Unix socket in a folder that only this user can enter: weights can be replaced
through it, which must not be open to others, and no port can collide. Each has a GPU of its own; on
a CPU they share the cores. They end with the process that started them, also when that is killed
(`guard.py`)."""

import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.common.files import ArtifactError, temporary_folder
from tasks.common.progress import progress
from tasks.engines.engine import EngineSettings, num_trainer_gpus
from tasks.models.policy import Policy, torch_device

logger = logging.getLogger(__name__)

START_SECONDS = 900.0  # a large policy takes long to load and to compile
LOG_TAIL = 2000  # characters of a server's log in an error
GUARD = Path(__file__).with_name("guard.py")
# variables that a server is started with
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that replace weights
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would put the first thread of every replica on the same core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# On a CPU vLLM would start one more process for the model, to set its threads, which are set
# already.
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Replica:
    """One server: its process (the guard's), the socket it listens on, and its log."""

    process: "subprocess.Popen[bytes]"
    socket: Path
    log: Path


class Replicas:
    """`settings.num_replicas` servers of `policy`, for a trainer of `num_processes`, or for none.
    `close` ends them, as does the end of this object or process."""

    def __init__(self, settings: EngineSettings, policy: Policy, num_processes: int = 0) -> None:
        files = ExitStack()
        self.folder = root = files.enter_context(temporary_folder(None, "winnow"))
        devices = choose_devices(settings, num_processes)
        self.replicas = [
            start(
                serve_command(settings, policy, root / f"{i}.sock"),
                root,
                i,
                device,
                settings.threads,
            )
            for i, device in enumerate(devices)
        ]
        self.close = weakref.finalize(self, end, self.replicas, files)
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Return when every server answers. Raises ArtifactError with the end of its log when one
        has ended, or takes longer than START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        waiting = list(self.replicas)
        with progress(len(waiting), "start vLLM servers", "server") as bar:
            while waiting:
                for replica in [replica for replica in waiting if is_serving(replica.socket)]:
                    waiting.remove(replica)
                    bar.update(1)
                ended = next(
                    (replica for replica in waiting if replica.process.poll() is not None), None
                )
                if ended or time.monotonic() > deadline:
                    self.fail(
                        ended or waiting[0],
                        "ended" if ended else f"did not answer in {START_SECONDS:.0f} s",
                    )
                time.sleep(0.1)

    def fail(self, replica: Replica, what: str) -> None:
        """End all servers and raise ArtifactError with the end of this one's log."""
        tail = replica.log.read_text(errors="replace")[-LOG_TAIL:]
        self.close()
        raise ArtifactError(
            f"a vLLM server that engine.num_replicas asked for {what}; the end of its log:\n{tail}"
        )


def is_serving(path: Path) -> bool:
    """Whether the server reports that it is healthy. It binds its socket long before."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            return connection.recv(64).split()[1:2] == [b"200"]
    except OSError:
        return False


def choose_devices(settings: EngineSettings, num_processes: int = 0) -> Sequence[str | None]:
    """Return the CUDA_VISIBLE_DEVICES of each replica, None on a CPU: the GPUs after those of the
    trainer's processes, where there are as many. Raises ArtifactError when there are fewer GPUs
    than replicas."""
    device, num_replicas = torch_device(settings.device), settings.num_replicas
    if device.type != "cuda":
        return [None] * num_replicas
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    if num_replicas > len(visible):
        raise ArtifactError(
            f"engine.num_replicas is {num_replicas}, and this machine shows {len(visible)} GPUs: "
            "lower it"
        )
    first = num_trainer_gpus(settings, num_processes, device, len(visible))
    return visible[first : first + num_replicas]


def serve_command(settings: EngineSettings, policy: Policy, path: Path) -> list[str]:
    """Return the command of vLLM's server with the options that the engine contract needs. The
    model's name is the policy's digest."""
    on_gpu = torch_device(settings.device).type == "cuda"
    options = {
        "--model": policy.folder,
        "--served-model-name": policy.digest,
        "--uds": path,
        "--dtype": settings.dtype,
        "--max-model-len": policy.max_length,
        "--max-num-seqs": settings.max_rows,
        "--gpu-memory-utilization": settings.memory_fraction,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--distributed-executor-backend": "uni",
    }
    flags = [
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
    ]
    if not on_gpu:  # as in engines/vllm.py
        flags += ["--no-enable-chunked-prefill", "--enforce-eager"]
    if policy.trust_remote_code:
        flags += ["--trust-remote-code"]
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *(str(part) for pair in options.items() for part in pair), *flags]


def start(
    command: list[str], folder: Path, number: int, device: str | None, threads: int
) -> Replica:
    """Start one server under a guard in a session of its own, so that a signal to this process's
    group does not end the guard before it has ended the server."""
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    # these belong to the engine in this process, or to other servers
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"):
        environment.pop(name, None)
    if device is None:
        environment |= CPU_ENVIRONMENT
    else:
        environment["CUDA_VISIBLE_DEVICES"] = device
    log = folder / f"{number}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", str(GUARD), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Replica(process, folder / f"{number}.sock", log)


def end(replicas: Sequence[Replica], files: ExitStack) -> None:
    """Close every guard's input, wait for the guards, and remove sockets and logs."""
    for replica in replicas:
        assert replica.process.stdin is not None
        replica.process.stdin.close()
    for replica in replicas:
        replica.process.wait()
    files.close()
