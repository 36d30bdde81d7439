"""Stages on another machine: two checkouts, a worker in one of them, a bucket between them."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import commands, elsewhere, lock
from tests.flows.project import Project, lines, shell
from tests.flows.test_processes import is_gone
from tests.flows.test_serve import wait_for
from tests.patience import PATIENCE
from tests.s3_server import S3Server

POOL = "gpu-pool"
LOCK = """\
schema: '2.0'
stages:
  code:
    cmd: exec python -m tasks.code
    params:
      params.yaml:
        prompt: "two

          lines"
  train@sgpo-0:
    cmd: exec python -m tasks.train
    outs:
    - path: data/runs/sgpo/0/train/policy
      md5: 1234.dir
"""
NEW = "  train@sgpo-0:\n    cmd: another\n"


def test_an_entry_of_the_lock_is_replaced_or_added_and_no_other_changes() -> None:
    assert list(lock.entries(LOCK)) == ["code", "train@sgpo-0"]
    assert lock.with_entry(LOCK, "train@sgpo-0", NEW) == LOCK[: LOCK.index("  train")] + NEW
    assert lock.with_entry(LOCK, "train@grpo-0", NEW) == LOCK + NEW
    assert lock.with_entry("", "train@sgpo-0", NEW) == lock.HEAD + NEW
    assert (
        lock.chosen(LOCK, ["train@sgpo-0", "report"]) == lock.HEAD + LOCK[LOCK.index("  train") :]
    )


@pytest.fixture
def mine(
    tmp_path: Path,
    finished: Path,
    environment: dict[str, str],
    prefect_url: str,
    s3: S3Server,
    bucket: str,
) -> Project:
    """A finished project with a bucket and a repository that others fetch from."""
    ours = {"PREFECT_API_URL": prefect_url, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    project = Project(tmp_path / "mine", {**environment, **s3.environment(), **ours})
    shutil.copytree(finished, project.root, symlinks=True)
    project.dvc("remote", "add", "--default", "team", f"{bucket}/dvc")
    git(project, "commit", "--quiet", "--all", "--message", "remote")
    shell(tmp_path, environment, "git", "init", "--quiet", "--bare", "origin")
    git(project, "remote", "add", "origin", str(tmp_path / "origin"))
    git(project, "push", "--quiet", "origin", "HEAD:main")
    return project


@pytest.fixture
def theirs(mine: Project, tmp_path: Path) -> Iterator[Project]:
    """Another checkout, with a worker."""
    project = Project(tmp_path / "theirs", mine.environment)
    shell(tmp_path, mine.environment, "git", "clone", "--quiet", "-b", "main", "origin", "theirs")
    worker = project.start("flows.worker", "--pool", POOL)
    asked = {"deployments": {"name": {"any_": [POOL]}}}
    wait_for(lambda: mine.post("deployments/filter", asked))
    yield project
    worker.terminate()
    worker.communicate(timeout=PATIENCE)


def git(project: Project, *arguments: str) -> str:
    return shell(project.root, project.environment, "git", *arguments)


@pytest.mark.parametrize("kind", ["report", "policy", "code"])
def test_what_git_keeps_is_not_sent(kind: str) -> None:
    with pytest.raises(elsewhere.SendError, match=f"{kind} runs where the flow does"):
        elsewhere.check_outputs(kind)
    elsewhere.check_outputs("train")


def test_code_that_is_not_committed_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    commands.git("init", "--quiet")
    (tmp_path / "params.yaml").touch()  # it is sent along
    elsewhere.check_tree()
    (tmp_path / "train.py").touch()
    with pytest.raises(elsewhere.SendError, match=r"train\.py is not as committed"):
        elsewhere.check_tree()


def test_a_pool_without_a_worker_is_refused(project: Project) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    output = project.flow("--on", "train=nobody", expect=1)
    assert "no worker has ever offered itself to the work pool nobody" in output
    assert "python -m flows.worker --pool nobody" in output
    assert 'flows/elsewhere.py"' not in output  # no traceback of it


@pytest.mark.s3
def test_a_stage_runs_in_another_checkout_and_is_up_to_date_here(
    mine: Project, theirs: Project
) -> None:
    mine.edit("tasks/train/real.py", r"\Z", "MORE = 1\n")
    git(mine, "commit", "--quiet", "--all", "--message", "another training")
    mine.edit("params.yaml", r"^  passes: 4", "  passes: 5")  # is sent, and need not be committed
    arguments = ("--on", f"train={POOL}", "--recipe", "grpo", "--recipe", "sgpo")

    output = mine.flow("--on", f"train={POOL}", "--recipe", "grpo", expect=1)
    assert "is not in the repository that" in output
    git(mine, "push", "--quiet", "origin", "HEAD:main")
    output = mine.flow(*arguments, "--concurrency", "2")
    sent = lines(output, f"sent to the work pool {POOL}")
    assert sorted(sent) == ["train@grpo-0", "train@sgpo-0"]
    ran = lines(output, "ran")
    assert {*sent, "evaluate@grpo-0", "evaluate@sgpo-0"} <= set(ran)
    assert "this is train@grpo-0, live" not in output
    for recipe in ("grpo", "sgpo"):
        file = Path(f"data/runs/{recipe}/0/train/flops.json")
        assert (theirs.root / file).read_text() == (mine.root / file).read_text()
    assert not (theirs.root / "data/runs/grpo/0/eval").exists()  # only what the stages read
    assert git(theirs, "status", "--porcelain") == ""
    assert "nothing to do" in mine.flow(*arguments)


@pytest.mark.s3
def test_an_interrupt_here_lets_the_stage_save_there(mine: Project, theirs: Project) -> None:
    mine.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    theirs.behave(train__grpo_0="hang")
    for name in ("behaviour.json", "*.hanging.pid", "graceful"):
        with (theirs.root / ".git/info/exclude").open("a") as file:
            file.write(f"{name}\n")
    flow = mine.start("flows.pipeline", "--on", f"train={POOL}", "--recipe", "grpo")
    stage = theirs.hanging()
    flow.send_signal(signal.SIGINT)
    output, _ = flow.communicate(timeout=PATIENCE)
    assert flow.returncode == 130, output
    assert wait_for((theirs.root / "graceful").exists)
    assert is_gone(stage)
    assert wait_for(lambda: git(theirs, "status", "--porcelain") == "")
