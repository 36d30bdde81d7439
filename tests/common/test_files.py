"""Temporary files of dead writers are removed; modes follow the folder."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.common import files
from tasks.common.files import make_private_folder, replace_file
from tests.test_imports import ROOT

WRITER = """
import sys
from pathlib import Path
from tasks.common import files

def wait(file):
    file.write(b"half")
    print("writing", flush=True)
    sys.stdin.read()

kind, path = sys.argv[1], Path(sys.argv[2])
if kind == "folder":
    with files.temporary_folder(path.parent, path.name) as folder:
        (folder / "file").write_text("half")
        print("writing", flush=True)
        sys.stdin.read()
else:
    files.replace_file(path, wait)
"""


def test_rounded_values_are_equal_in_spite_of_the_order_of_a_sum() -> None:
    tenths = [0.1, 0.2, 0.3, 0.4]
    one, other = sum(tenths[:3]), sum(reversed(tenths[:3]))
    assert one != other
    found = [files.rounded({"a": [value, 7, "x", None, (1.5e11 / 7,)]}) for value in (one, other)]
    assert found == [{"a": [0.6, 7, "x", None, [21428600000.0]]}] * 2


def write(path: Path) -> None:
    replace_file(path, lambda file: file.write(b"whole"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_next_write_removes_the_files_of_killed_writers_alone(kind: str, tmp_path: Path) -> None:
    line = [sys.executable, "-c", WRITER, kind, str(tmp_path / "target")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"writing\n"
        written = set(tmp_path.iterdir())
        write(tmp_path / "other")
        assert set(tmp_path.iterdir()) == {*written, tmp_path / "other"}
        process.kill()
    files.remove_unfinished_once.cache_clear()  # as in another process
    write(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_temporary_file_removed_before_its_lock_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes files between the creation of a file and its lock."""
    make, taken = files.tempfile.mkstemp, []

    def make_and_lose(**options: object) -> tuple[int, str]:
        descriptor, name = make(**options)
        if not taken:
            taken.append(name)
            files.remove_unfinished(tmp_path)
        return descriptor, name

    monkeypatch.setattr(files.tempfile, "mkstemp", make_and_lose)
    write(tmp_path / "target")
    assert taken
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target").read_bytes() == b"whole"


def test_link_in_a_shared_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / ".x.unfinished").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "shared" / "target")
    assert (tmp_path / "elsewhere").read_text() == "kept"


# --------------------------------------------------------------------------------------------------
# modes


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(
    ("around", "folder", "file"),
    [
        (0o755, 0o755, 0o644),
        (0o700, 0o700, 0o600),
        (0o750, 0o750, 0o640),
        (0o2770, 0o2770, 0o660),
        (0o2775, 0o2775, 0o664),
        (0o775, 0o775, 0o664),
        (0o1777, 0o755, 0o644),
    ],
    ids=oct,
)
def test_files_and_folders_follow_the_folder(
    around: int, folder: int, file: int, tmp_path: Path, umask: object
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(around)
    path = root / "a" / "b" / "file"
    write(path)
    assert [mode(part) for part in (root / "a", root / "a" / "b", path)] == [folder, folder, file]
    assert path.stat().st_gid == root.stat().st_gid


def test_umask_applies_in_a_folder_without_a_group(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    tmp_path.chmod(0o755)
    umask(0o077)
    write(tmp_path / "folder" / "file")
    assert mode(tmp_path / "folder") == 0o700
    assert mode(tmp_path / "folder" / "file") == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder to any group")
@pytest.mark.parametrize("around", [0o775, 0o2775], ids=oct)
def test_group_of_a_shared_folder_is_kept(around: int, tmp_path: Path) -> None:
    os.chown(tmp_path, -1, 12345)
    tmp_path.chmod(around)
    write(tmp_path / "folder" / "file")
    assert (tmp_path / "folder").stat().st_gid == 12345
    assert (tmp_path / "folder" / "file").stat().st_gid == 12345


@pytest.mark.parametrize(
    ("around", "expected"), [(0o755, 0o700), (0o775, 0o700), (0o2775, 0o2775)], ids=oct
)
def test_private_folder_is_for_its_owner_or_a_setgid_group(
    around: int, expected: int, tmp_path: Path, umask: object
) -> None:
    tmp_path.chmod(around)
    make_private_folder(tmp_path / "store")
    assert mode(tmp_path / "store") == expected
    (tmp_path / "store").chmod(0o711)
    make_private_folder(tmp_path / "store")
    assert mode(tmp_path / "store") == 0o711  # set by a user
