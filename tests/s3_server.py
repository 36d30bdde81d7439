"""A real S3 server on loopback: the Ceph RADOS Gateway of Debian's packages, one node, objects in
memory.

It needs the packages `ceph-mon ceph-osd radosgw ceph-common`. The three daemons (monitor, object
store, gateway) run as children of the test, end with it, and write to one folder."""

import shlex
import shutil
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import httpx

from tasks.common.processes.ending import die_with_parent
from tasks.common.processes.ports import free_port
from tests.patience import PATIENCE, wait_for

PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
ACCESS_KEY, SECRET_KEY = "winnow-access-key", "winnow-secret-key-known-to-nobody-else"

CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv4 = true
ms bind ipv6 = false
auth allow insecure global id reclaim = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
paxos propose interval = 0.02
paxos min wait = 0.02
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 0
osd client watch timeout = 1
osd objectstore = memstore
memstore device bytes = 2147483648
osd max object name len = 256
osd max object namespace len = 64
osd class load list = *
osd class default list = *
run dir = {folder}
admin socket = {folder}/$name.$pid.asok
keyring = {folder}/keyring
log file = {folder}/$name.log
pid file = {folder}/$name.pid
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
keyring = {folder}/osd/keyring
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw relaxed region enforcement = true
rgw dynamic resharding = false
rgw cache enabled = false
"""


def missing() -> str | None:
    """Return the reason why no server can be started on this machine, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    packages = "apt-get install ceph-mon ceph-osd radosgw ceph-common"
    return f"no {absent[0]} for a real S3 server ({packages})" if absent else None


class S3Server:
    """A running server in `folder`. Its one user has `ACCESS_KEY` and `SECRET_KEY`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, Any] = {}
        self.port, v2, v1 = (free_port() for _ in range(3))
        self.url = f"http://127.0.0.1:{self.port}"
        values = {"folder": folder, "port": self.port, "v2": v2, "v1": v1, "fsid": uuid.uuid4()}
        (folder / "ceph.conf").write_text(CONFIGURATION.format(**values))
        try:
            self.start_monitor(f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]", str(values["fsid"]))
            self.start_object_store()
            keys = f"--access-key {ACCESS_KEY} --secret-key {SECRET_KEY}"
            self.run(f"radosgw-admin user create --uid winnow --display-name winnow {keys}")
            self.start_gateway()
        except BaseException:
            self.stop()
            raise

    def run(self, line: str) -> None:
        """Run one of Ceph's commands on this server."""
        command(f"{line} -c {self.folder}/ceph.conf --keyring {self.folder}/keyring")

    def spawn(self, program: str, *arguments: str) -> None:
        """Start one of Ceph's daemons, in the foreground of its own process."""
        with (self.folder / f"{program}.out").open("ab") as out:
            line = [program, "-f", "-c", str(self.folder / "ceph.conf"), *arguments]
            self.daemons[program] = subprocess.Popen(
                line, stdout=out, stderr=out, preexec_fn=die_with_parent
            )

    def start_monitor(self, address: str, fsid: str) -> None:
        monitors = self.folder / "monmap"
        all_rights = "--cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'"
        tool = f"ceph-authtool {self.folder}/keyring --gen-key -n"
        command(f"{tool} mon. --create-keyring --cap mon 'allow *'")
        for name in ("client.admin", "client.rgw"):
            command(f"{tool} {name} {all_rights}")
        command(f"monmaptool --create --addv a {address} --fsid {fsid} {monitors}")
        (self.folder / "mon").mkdir()
        self.run(f"ceph-mon --mkfs -i a --monmap {monitors}")
        self.spawn("ceph-mon", "-i", "a")

    def start_object_store(self) -> None:
        (self.folder / "osd").mkdir()
        name = uuid.uuid4()
        self.run(f"ceph osd new {name}")
        allowed = "mon 'allow profile osd' osd 'allow *'"
        self.run(f"ceph auth get-or-create osd.0 {allowed} -o {self.folder}/osd/keyring")
        command(f"ceph-osd -c {self.folder}/ceph.conf -i 0 --mkfs --osd-uuid {name}")
        self.spawn("ceph-osd", "-i", "0")
        self.run("ceph osd crush add osd.0 1.0 root=default host=localhost")

    def start_gateway(self) -> None:
        """Start the S3 side, and wait until it answers."""
        self.spawn("radosgw", "-n", "client.rgw", "-k", str(self.folder / "keyring"))
        wait_for(lambda: answers(self.url), self.daemons["radosgw"])

    def environment(self) -> dict[str, str]:
        """Return the variables that a user sets for this server, without any proxy."""
        no_file = str(self.folder / "no-such-file")
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_CONFIG_FILE": no_file,
            "AWS_SHARED_CREDENTIALS_FILE": no_file,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def kill_gateway(self) -> None:
        """Kill the gateway, like a crash: connections are cut. Stored objects stay."""
        self.daemons["radosgw"].kill()
        self.daemons["radosgw"].wait()

    def hold_gateway(self) -> None:
        """Stop the gateway: it still accepts connections, but answers nothing."""
        self.daemons["radosgw"].send_signal(signal.SIGSTOP)

    def release_gateway(self) -> None:
        self.daemons["radosgw"].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill all daemons."""
        for daemon in self.daemons.values():
            daemon.kill()
        for daemon in self.daemons.values():
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def command(line: str) -> None:
    """Run a command. Raise RuntimeError with the end of its log if it fails."""
    words = shlex.split(line)
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr[-2000:]}")


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=2.0)
    except httpx.TransportError:
        return False
    return True
