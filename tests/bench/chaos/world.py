"""A small world of the chaos harness: a project with the real pipeline, and its states before each
stage and at the end. `making` makes it."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tasks.common.params import coordinates
from tests.bench.chaos.operations import Plan
from tests.full import remount
from tests.s3_server import S3Server

STAGES = {
    "code": "code",
    "ingest": "ingest",
    "policy": "policy",
    "profile": "profile",
    "baseline": "baseline",
    "allocate": "allocate@grpo-0",
    "train": "train@grpo-0",
    "evaluate": "evaluate@grpo-0",
    "report": "report",
}
DONE = "done"
KEPT = ("data", ".dvc", "dvc.lock", "params.yaml")  # the project's parts in a snapshot
ROOM = 2**28  # bytes of a data root's separate file system
SECONDS = 300.0  # longer than any command of this world on a busy machine


@dataclass
class World:
    """One world in `folder`: commands run in `project`; `snapshots` are the states to restore."""

    folder: Path
    plan: Plan
    facts: dict[str, Any] = field(default_factory=dict)
    forks: "subprocess.Popen[bytes] | None" = None
    server: S3Server | None = None  # of all worlds
    store: str | None = None  # a bucket of this event alone
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, for this event

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def stages(self) -> list[str]:
        """The stages of this world, in order."""
        return list(self.facts["stages"])

    @property
    def data(self) -> Path:
        return self.project / "data"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def environment(self, forked: bool = False) -> dict[str, str]:
        """Return the environment of the commands: all data is in the world, no telemetry."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        named = [n for n in os.environ if n.startswith(("AWS_", "PREFECT_", "MLFLOW_", "WINNOW_"))]
        kept = {name: value for name, value in os.environ.items() if name not in named}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        ours = {
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DVC_NO_ANALYTICS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_HOME": str(self.folder / "home" / "prefect"),
            "PREFECT_LOCAL_STORAGE_PATH": str(self.folder / "home" / "prefect" / "storage"),
            "DVC_SITE_CACHE_DIR": str(self.folder / "home" / "dvc"),
            "TMPDIR": str(self.folder / "tmp"),
            "NO_PROXY": "127.0.0.1",
        }
        warm = {"WINNOW_FORKS": str(self.folder / "forks")} if forked else {}
        return {**kept, **ours, **self.variables, **self.plan.environment(), **warm}

    def start(
        self, line: Sequence[str], *, forked: bool = False, **extra: str
    ) -> "subprocess.Popen[bytes]":
        """Start a command in its own session, as in a terminal; its output goes to `log`."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                line,
                cwd=self.project,
                env={**self.environment(forked), **extra},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, line: Sequence[str], **options: Any) -> tuple[int, str]:
        """Run a command to its end, and return its exit status and output."""
        self.log.unlink(missing_ok=True)
        process = self.start(line, **options)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            end(self.processes())
            code = -1
        return code, self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this world, except the harness's fork server."""
        ours = {os.getpid(), *([self.forks.pid] if self.forks else [])}
        mark = f"CHAOS_PLAN={self.plan.path}\0".encode()
        found = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                is_here = mark in environment and process.pid not in ours
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    # ----------------------------------------------------------------------------------------------

    def snapshot(self, name: str) -> None:
        copy(self.project, self.folder / "snapshots" / name)

    def mount(self) -> None:
        """Mount a separate file system at the data root, until the world is restored."""
        kept = self.folder / "kept"
        remove(kept)
        shutil.copytree(self.data, kept, symlinks=True)
        remove(self.data)
        self.data.mkdir()
        line = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "chaos", str(self.data)]
        subprocess.run(line, check=True)
        shutil.copytree(kept, self.data, symlinks=True, dirs_exist_ok=True)

    def limit(self, room: int | None) -> None:
        """Leave `room` bytes on the data root's file system, or enough for all."""
        state = os.statvfs(self.data)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize
        size = ROOM if room is None else used + max(room, 4096)
        remount(self.data, f"size={size}")

    def restore(self, name: str) -> None:
        """Restore the world to a snapshot, with an empty folder for temporary files."""
        self.store, self.variables = None, {}
        if os.path.ismount(self.data):
            subprocess.run(["umount", "--lazy", str(self.data)], check=True)
        for part in KEPT:
            remove(self.project / part)
        copy(self.folder / "snapshots" / name, self.project)
        if (self.project / "dvc.lock").exists():
            self.commit_lock()
        for part in ("home", "tmp"):
            remove(self.folder / part)
        shutil.copytree(self.folder / "snapshots" / "home", self.folder / "home", symlinks=True)
        (self.folder / "tmp").mkdir()

    def commit_lock(self) -> None:
        """Commit dvc.lock, as a user does after a run, so that it can be restored."""
        remove(self.project / ".git" / "index.lock")  # left by a killed git
        subprocess.run(["git", "add", "dvc.lock"], cwd=self.project, check=True)
        line = ["git", "commit", "--quiet", "--allow-empty", "--message", "run"]
        subprocess.run(line, cwd=self.project, check=True)

    def serve_forks(self) -> None:
        """Start the process from which stages are forked, as in a flow."""
        (self.folder / "forks").unlink(missing_ok=True)
        line = [sys.executable, "-m", "flows.pipeline.launch", str(os.getpid()), "forks"]
        self.forks = self.start([*line, str(self.folder / "forks")])

    def close(self) -> None:
        if self.forks:
            self.forks.kill()
            self.forks.wait()
            self.forks = None


def copy(source: Path, target: Path) -> None:
    """Copy the content of a snapshot, with file times."""
    target.mkdir(parents=True, exist_ok=True)
    for part in KEPT:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, symlinks=True)
        elif (source / part).exists():
            shutil.copy2(source / part, target / part)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    psutil.wait_procs(processes, timeout=10)


def repro(stage: str) -> list[str]:
    return ["dvc", "repro", "--single-item", STAGES[stage]]


def direct(stage: str, project: Path) -> list[str]:
    """Return the stage's own command, as in dvc.yaml, with the recipe and seed of a cell."""
    text = yaml.safe_load((project / "dvc.yaml").read_text())["stages"][stage]["cmd"]
    _, recipe, seed = coordinates(STAGES[stage])
    cell = ["--recipe", recipe, "--seed", str(seed)] if recipe else []
    return [*text.removeprefix("exec ").split(), *cell]


FLOW = ["python", "-m", "flows", "run"]


def outputs(project: Path, stages: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return, for every stage, the digest of each file among its DVC outputs, by path."""
    lock = yaml.safe_load((project / "dvc.lock").read_text())["stages"]
    made: dict[str, dict[str, str]] = {}
    for stage in stages:
        paths = [project / out["path"] for out in lock[STAGES[stage]]["outs"]]
        files = [f for path in paths for f in (path.rglob("*") if path.is_dir() else [path])]
        made[stage] = {
            file.relative_to(project).as_posix(): digest(file)
            for file in sorted(files)
            if file.is_file()
        }
    return made


def differing(project: Path, expected: dict[str, str]) -> list[str]:
    """Return the outputs that are missing or have other contents."""
    return [name for name, value in expected.items() if digest(project / name) != value]


def grown(world: World, stage: str) -> int:
    """Return the number of bytes that the stage adds to an undisturbed data root."""
    names = [*world.stages, DONE]
    before, after = stage, names[names.index(stage) + 1]
    sizes = [size(world.folder / "snapshots" / name / "data") for name in (before, after)]
    return sizes[1] - sizes[0]


def size(folder: Path) -> int:
    """Return the bytes on disk of the files in a folder."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "missing"
