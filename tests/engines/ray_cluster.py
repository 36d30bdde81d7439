"""A Ray cluster of several nodes on this machine, whose nodes can be killed one by one."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.common.processes.ports import free_port
from tests.patience import PATIENCE

TOKEN = secrets.token_hex(16)


class RayCluster:
    """A context manager. Processes with `environment` can connect to the head at `address`. Without
    a token every process can."""

    def __init__(self, num_cpus: list[int], token: str | None = TOKEN) -> None:
        self.num_cpus = num_cpus
        self.temporary = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.folder = Path(self.temporary.name)  # short: Ray's sockets are in it
        self.address = f"127.0.0.1:{free_port()}"
        own = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        if token:
            own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self.environment = {**os.environ, **own}
        self.nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "RayCluster":
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false"]
        self.start([*head, f"--temp-dir={self.folder / 't'}"], self.num_cpus[0])
        for num in self.num_cpus[1:]:
            self.start([f"--address={self.address}"], num)
        return self

    def __exit__(self, *error: object) -> None:
        for number in range(len(self.nodes)):
            self.kill(number)
        self.temporary.cleanup()

    def start(self, options: list[str], num_cpus: int) -> None:
        """Start a node, and wait for its raylet."""
        line = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        line += [*options, "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        line += [f"--num-cpus={num_cpus}", "--num-gpus=0", "--object-store-memory=80000000"]
        log = (self.folder / f"node-{len(self.nodes)}.log").open("wb")
        node = subprocess.Popen(
            line, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        log.close()
        self.nodes.append(node)
        deadline = time.monotonic() + PATIENCE
        while "Ray runtime started" not in Path(log.name).read_text(errors="replace"):
            assert node.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.1)

    def kill(self, number: int) -> None:
        """Kill all processes of a node at once, as in a power failure."""
        node = self.nodes[number]
        with suppress(psutil.NoSuchProcess):
            everyone = psutil.Process(node.pid).children(recursive=True)
            for process in [psutil.Process(node.pid), *everyone]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(everyone, timeout=PATIENCE)
        node.wait()
