"""The scratch project: functions that make, change and run it."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.files import commit_all, copy_project
from tests.patience import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ("ingest", "policy", "profile", "allocate", "train", "evaluate", "report")
COPIED = (
    "dvc.yaml",
    "params.yaml",
    ".dvcignore",
    ".gitignore",
    ".dvc/config",
    ".dvc/.gitignore",
    "data/.gitignore",
    "requirements.txt",
    "requirements/cpu.txt",
)


def build(root: Path) -> Path:
    """Make a project of the real dvc.yaml, parameters, flows and tasks, with fast stages.

    Each stage runs `fake_stage.py`. Its own `__main__` is beside it as `real.py`, imported in a
    function that is never called, so that the real stage `code` finds the same files as in the
    project."""
    copy_project(root, *COPIED, "flows", "recipes", "tasks")
    shutil.copy(
        Path(__file__).with_name("fake_tracking.py"), root / "tasks/common/tracking/__init__.py"
    )
    fake = Path(__file__).with_name("fake_stage.py").read_text()
    for stage in STAGES:
        main = root / "tasks" / stage / "__main__.py"
        main.rename(main.with_name("real.py"))
        main.write_text(f"{fake}\n\ndef never():\n    from tasks.{stage} import real\n")
    return commit_all(root)


def shell(root: Path, environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Project:
    """A scratch project and the environment in which it runs."""

    root: Path
    environment: dict[str, str]

    def winnow(self, *arguments: str, expect: int = 0) -> str:
        """Run `winnow` and return its output."""
        command = [sys.executable, "-m", "flows", *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PATIENCE, **self.options())
        assert done.returncode == expect, done.stdout
        return done.stdout

    def flow(self, *arguments: str, expect: int = 0) -> str:
        """Run `winnow run` and return its output."""
        return self.winnow("run", *arguments, expect=expect)

    def start(self, *module: str) -> "subprocess.Popen[str]":
        """Start a module in a new session, as a terminal would."""
        command = [sys.executable, "-m", *module]
        return subprocess.Popen(command, start_new_session=True, **self.options())

    def without_server(self) -> "Project":
        """Return the same project without a Prefect server, which a run with nothing to do does not
        need."""
        named = "PREFECT_API_URL"
        rest = {name: value for name, value in self.environment.items() if name != named}
        return Project(self.root, rest)

    def options(self) -> dict[str, Any]:
        """Return the arguments of a subprocess in this project, with all output in one stream."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.root, "env": self.environment, **streams}

    def dvc(self, *arguments: str) -> str:
        return shell(self.root, self.environment, sys.executable, "-m", "dvc", *arguments)

    def status(self) -> Any:
        return json.loads(self.dvc("status", "--json"))

    def edit(self, name: str, pattern: str, replacement: str) -> None:
        path = self.root / name
        text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
        assert count, f"{pattern} is not in {name}"
        path.write_text(text)

    def behave(self, **behaviour: str) -> None:
        """Make stages `fail`, `hang` or `meet`. `train@sgpo-0` is written train__sgpo_0."""
        named = {
            stage.replace("__", "@").replace("_", "-"): act for stage, act in behaviour.items()
        }
        (self.root / "behaviour.json").write_text(json.dumps(named))

    def hanging(self) -> int:
        """Wait until a stage hangs, and return its process id."""
        (pid,) = self.all_hanging(1)
        return pid

    def all_hanging(self, number: int) -> list[int]:
        """Wait until `number` stages hang, and return their process ids."""

        def pids() -> list[int]:
            written = [file.read_text() for file in self.root.glob("*.hanging.pid")]
            return list(map(int, written)) if len(written) == number and all(written) else []

        return wait_for(pids)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        url = self.environment["PREFECT_API_URL"]
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=30) as client:
            token = client.get("csrf-token", params={"client": "tests"}).json()["token"]
            own = {"Prefect-Csrf-Client": "tests", "Prefect-Csrf-Token": token}
            return client.post(path, json=body, headers=own).raise_for_status().json()

    def record(self) -> Any:
        return json.loads((self.root / "data/tracking/record.json").read_text())


def lines(output: str, word: str) -> list[str]:
    """Return the stages whose line contains `word`."""
    return re.findall(rf"^\[\d+/\d+\] (\S+): {word}", output, flags=re.MULTILINE)
