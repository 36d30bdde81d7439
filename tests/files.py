"""Files for tests."""

import shutil
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write `files`, a text by path, under `root`; return `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def copy_project(root: Path, *names: str) -> Path:
    """Copy files and folders of the project, without compiled modules, to `root`; return `root`."""
    for name in names:
        source, target = PROJECT / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return root


def commit_all(root: Path) -> Path:
    """Make a git repository with all files under `root` that git does not ignore; return `root`."""
    user = [("config", "user.name", "t"), ("config", "user.email", "t@example.com")]
    commit = [("add", "--all"), ("commit", "--quiet", "--message", "start")]
    for command in (("init", "--quiet"), *user, *commit):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root
