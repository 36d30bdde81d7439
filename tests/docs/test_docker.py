"""The image, which cannot be built here: files in docker/Dockerfile exist, commands that can run
outside of a container do, and its .dockerignore excludes the correct files."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import yaml
from docker.utils.build import exclude_paths

from tests.docs.pages import ROOT
from tests.docs.test_commands import TARGETS, VARIABLES, programs
from tests.files import copy_project, plant

LINES = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
STEPS = [
    (line.split()[0], line.split(maxsplit=1)[1])
    for line in LINES
    if line and not line.startswith("#")
]
IGNORED = [
    line
    for line in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    if not line.startswith("#")
]


def all_of(name: str) -> list[str]:
    """Return the arguments of every instruction of this name."""
    return [rest for step, rest in STEPS if step == name]


def commands() -> list[list[str]]:
    """Return the words of every command of RUN, without variables before it."""
    found = [shlex.split(part) for rest in all_of("RUN") for part in rest.split("&&")]
    return [[word for n, word in enumerate(words) if n or "=" not in word] for words in found]


def copies() -> list[tuple[list[str], str]]:
    """Return the sources and the target of every COPY."""
    found = [[w for w in rest.split() if not w.startswith("--")] for rest in all_of("COPY")]
    return [(words[:-1], words[-1]) for words in found]


def before_env(folder: Path) -> Path:
    """Copy the files that the image has before it makes the environment."""
    for sources, target in copies():
        if sources == ["."]:
            return folder
        for source in sources:
            (folder / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, folder / target)
    raise AssertionError("the whole project is never copied")


def test_the_base_image_is_that_of_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert all_of("FROM") == [workflow["jobs"]["all"]["container"]["image"]]


def test_the_packages_are_among_those_of_ci() -> None:
    [listed] = re.findall(r"^PACKAGES=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    [words] = [words for words in commands() if words[0] == "apt-get" and "install" in words]
    packages = [w for w in words[words.index("install") + 1 :] if not w.startswith("-")]
    assert packages == ["bubblewrap"]
    assert set(packages) <= set(listed.split())


def test_make_targets_and_variables_exist() -> None:
    arguments = {rest.partition("=")[0] for rest in all_of("ARG")}
    for words in [words for words in commands() if words[0] == "make"]:
        assert {word for word in words[1:] if "=" not in word} <= TARGETS
        for name, value in (word.split("=") for word in words[1:] if "=" in word):
            assert name in VARIABLES
            assert value == f"${name}"
            assert name in arguments
    environment = dict(pair.split("=") for rest in all_of("ENV") for pair in rest.split())
    assert environment["VENV"] in environment["PATH"]


def test_copied_files_exist_and_are_not_ignored(tmp_path: Path) -> None:
    sources = [source for named, _ in copies() for source in named]
    assert all((ROOT / source).is_file() for source in sources[:-1]), sources
    assert set(sources[:-1]) <= set(exclude_paths(str(before_env(tmp_path)), IGNORED))


def test_make_env_needs_only_copied_files(tmp_path: Path) -> None:
    folder = before_env(tmp_path / "winnow")
    for kind in ("none", "cpu", "gpu"):
        variables = (f"VLLM={kind}", "TORCH_INDEX=", f"VENV={tmp_path}/venv")
        line = ["make", "--dry-run", "env", *variables, f"PYTHON={sys.executable}"]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        read = re.findall(r"-r <?\(?(?:grep -v '\S+' )?([\w./-]+)|-c ([\w./-]+)", done.stdout)
        files = {name for pair in read for name in pair if name}
        assert "requirements.txt" in files
        assert all((folder / name).is_file() for name in files), files
        assert f"touch {tmp_path}/venv/.installed-{kind}" in done.stdout


def test_the_project_can_be_installed_from_copied_files(tmp_path: Path) -> None:
    """pip builds it for --editable: both packages, and the command."""
    folder = before_env(tmp_path / "winnow")
    build = "from setuptools.build_meta import build_editable; build_editable('.')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("winnow-*.whl")
    with ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    [finder] = [text for name, text in texts.items() if name.endswith("_finder.py")]
    [points] = [text for name, text in texts.items() if name.endswith("entry_points.txt")]
    for package in ("flows", "tasks"):
        assert f"'{package}': '{folder / package}'" in finder
    assert "winnow = flows.__main__:main" in points


def test_dvc_works_without_git_after_its_command(tmp_path: Path) -> None:
    copy_project(tmp_path, ".dvc/config", "dvc.yaml", "params.yaml")
    [words] = [words for words in commands() if words[0] == "dvc"]
    for line in (words, ["dvc", "dag", "--dot"]):
        command = [sys.executable, "-m", *line]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert '"profile" -> "allocate@grpo-0"' in done.stdout


def test_user_volume_and_entrypoint() -> None:
    last = dict(STEPS)
    assert last["USER"] == "winnow"
    assert any(words[0] == "useradd" and words[-1] == "winnow" for words in commands())
    assert last["VOLUME"] == f"{last['WORKDIR']}/data"
    assert json.loads(last["ENTRYPOINT"]) == ["winnow"]


def test_files_excluded_by_dockerignore(tmp_path: Path) -> None:
    excluded = {
        "data/policy/model.safetensors",
        ".git/config",
        *(".dvc/cache/files/ab", ".dvc/tmp/lock", ".dvc/config.local"),
        ".env",
        ".venv-docs/bin/python",
        "tasks/grading/__pycache__/pool.pyc",
        "winnow.egg-info/PKG-INFO",
        "docs/_build/index.html",
    }
    included = {
        *(".dvc/config", ".dvcignore", "dvc.yaml", "dvc.lock", "params.yaml"),
        *("examples/own-verifier/params.yaml", "flows/pipeline/flow.py"),
        *("tasks/store/folder.py", "tasks/ingest/sources/mbpp.py"),
    }
    plant(tmp_path, dict.fromkeys((*excluded, *included), ""))
    found = exclude_paths(str(tmp_path), IGNORED)
    assert {name for name in found if (tmp_path / name).is_file()} == included


def test_dockerignore_has_the_patterns_of_gitignore() -> None:
    bare = {pattern.removeprefix("**/") for pattern in IGNORED}
    for line in (ROOT / ".gitignore").read_text().splitlines():
        assert line.strip("/") in bare


def test_the_pages_commands_fit_the_image() -> None:
    """Build arguments, and paths in the container; test_commands checks the words of `winnow`."""
    arguments = {rest.partition("=")[0] for rest in all_of("ARG")}
    for command in programs("docker"):
        words = command.words
        given = [words[n + 1] for n, word in enumerate(words) if word == "--build-arg"]
        assert {pair.partition("=")[0] for pair in given} <= arguments
        mounts = [words[n + 1].rpartition(":")[2] for n, word in enumerate(words) if word == "-v"]
        assert set(mounts) <= {*all_of("WORKDIR"), *all_of("VOLUME")}
