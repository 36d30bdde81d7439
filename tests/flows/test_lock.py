"""A dvc.lock that cannot be read: after a merge of git, or damaged."""

import re
import subprocess
from pathlib import Path

import pytest

from flows.pipeline import lock
from tests.flows.project import Project

GOOD = "schema: '2.0'\nstages:\n  code:\n    cmd: x\n"
MERGED = "<<<<<<< HEAD\n    cmd: y\n=======\n    cmd: z\n>>>>>>> other\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"schema: '2.0'\n", "has no stages"),
        (b"stages: [1]\n", "not a mapping"),
        (b"stages: {code: \xff}\n", "not YAML"),
        (b"stages: {code", "not YAML"),
        ((GOOD + MERGED).encode(), "conflict markers of a merge"),
    ],
)
def test_unreadable_lock_is_named_with_its_repair(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "other/dvc.lock"
    path.parent.mkdir(parents=True)
    path.write_text(GOOD)
    assert lock.read(path) == {"code": {"cmd": "x"}}
    assert lock.broken(tmp_path) == []
    path.write_bytes(content)
    (message,) = lock.broken(tmp_path)
    assert why in message
    assert "git checkout HEAD -- " in message
    with pytest.raises(lock.LockError):
        lock.read(path)


ENTRIES = "".join(f"  {name}:\n    cmd: {name}\n    md5: 0a\n" for name in ("code", "a", "b", "c"))
WHOLE = f"schema: '2.0'\nstages:\n{ENTRIES}"


@pytest.mark.parametrize(
    ("now", "is_restored"),
    [
        (WHOLE, False),
        *((WHOLE[:end], True) for end in (0, 12, 21, 33, WHOLE.index("  c:"), len(WHOLE) - 32)),
        (WHOLE.replace("cmd: a", "cmd: new")[: WHOLE.index("  c:")], True),  # while a is recorded
        (WHOLE + "  d:\n    cmd: d\n", False),  # d is new
        (WHOLE.replace("  code:", "  ingest:"), False),  # of another commit
        (f"{GOOD}{MERGED}", False),
        (None, False),
    ],
)
def test_a_lock_that_a_kill_cut_is_restored(
    tmp_path: Path, now: str | None, is_restored: bool
) -> None:
    path, copy = tmp_path / "dvc.lock", tmp_path / "locks" / "dvc.lock"
    path.write_text(WHOLE)
    lock.keep(path, copy)
    path.unlink()
    if now is not None:
        path.write_text(now)
    lock.restore(path, copy)
    assert (path.read_text() if path.exists() else None) == (WHOLE if is_restored else now)
    assert not copy.exists()
    lock.restore(path, copy)


def git(project: Project, *arguments: str) -> int:
    return subprocess.run(["git", *arguments], cwd=project.root, capture_output=True).returncode


def commit(project: Project, digest: str) -> None:
    """Commit another digest in the first entry of dvc.lock."""
    path = project.root / "dvc.lock"
    path.write_text(re.sub(r"md5: \w+", f"md5: {digest}", path.read_text(), count=1))
    assert git(project, "commit", "--quiet", "--all", "--message", digest) == 0


def test_commands_name_the_repair_after_a_merge_with_conflicts(project: Project) -> None:
    assert git(project, "checkout", "--quiet", "-b", "other") == 0
    commit(project, "a" * 32)
    assert git(project, "checkout", "--quiet", "-b", "mine", "HEAD~1") == 0
    commit(project, "b" * 32)
    assert git(project, "merge", "other") == 1
    for output in (project.flow(expect=1), project.winnow("doctor", expect=1)):
        assert "dvc.lock cannot be read (it has the conflict markers of a merge)" in output
        assert "`git checkout HEAD -- dvc.lock`" in output
        assert "Traceback" not in output


def test_lock_refused_by_dvc_is_named_with_its_repair(project: Project) -> None:
    """A lock that is cut in the middle of an entry is valid YAML, and has stages."""
    path = project.root / "dvc.lock"
    whole = path.read_text()
    path.write_text(whole[: whole.index("params.yaml:\n") + len("params.yaml:\n")])
    assert set(lock.read(path)) == {"code"}
    output = project.flow(expect=1)
    assert "dvc.lock cannot be read (see DVC's output above)" in output
    assert "`git checkout HEAD -- dvc.lock`" in output
    assert git(project, "checkout", "HEAD", "--", "dvc.lock") == 0
    assert "nothing to do" in project.without_server().flow()
