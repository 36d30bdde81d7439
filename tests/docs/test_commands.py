"""Every command in the documentation exists and accepts its options."""

import argparse
import importlib.util
import io
import re
import runpy
import shlex
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tasks.common import recipes
from tests.docs.pages import LANGUAGES, ROOT, Command, blocks, commands
from tests.stages import FORKS

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE)) | {"VLLM"}

# Programs outside the environment, and why they are named.
FOREIGN = {
    "vllm": "started by the reader on another machine; tests/engines starts it with these options",
    "source": "activates the environment",
    "export": "sets variables",
    "docker": "tests/docs/test_docker.py reads its options",
    "ray": "starts a cluster; tests/engines/ray_cluster.py starts one with these options",
    "cp": "copies an example; what it copies exists",
    "git": "shares commits, and repairs dvc.lock as tests/flows/test_lock.py does",
}


def programs(name: str) -> list[Command]:
    return [command for command in commands() if command.words[0] == name]


def modules() -> list[Command]:
    """Return the commands of this project's modules."""
    named = [command for command in programs("python") if command.words[1] == "-m"]
    return [command for command in named if command.words[2] != "pip"]


def package(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    return Path(str(spec.origin)).parent


def source(module: str) -> Path:
    """Return the file that `python -m module` runs."""
    base = ROOT.joinpath(*module.split("."))
    files = [base / "__main__.py", base.with_suffix(".py")]
    return next(path for path in files if path.exists())


def test_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"--editable \"?\.\[([\w,]+)\]", "".join(b.text for b in blocks()))
    assert named
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


def test_blocks_have_known_languages() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES


def test_every_command_has_a_known_program() -> None:
    known = {"make", "python", "winnow", "dvc", "mlflow", "prefect", *FOREIGN}
    assert [str(command) for command in commands() if command.words[0] not in known] == []
    assert len(commands()) > 40


def test_files_in_commands_exist() -> None:
    tests = [command for command in modules() if command.words[2] == "pytest"]
    named = [(c, c.words[1:]) for c in programs("cp")] + [(c, c.words[3:]) for c in tests]
    assert len(named) > 5
    for command, paths in named:
        assert all((ROOT / path).exists() for path in paths), str(command)


def test_make_targets_and_variables_exist() -> None:
    for command in programs("make"):
        targets = {word for word in command.words[1:] if "=" not in word}
        variables = {word.partition("=")[0] for word in command.words[1:] if "=" in word}
        assert targets <= TARGETS, str(command)
        assert variables <= VARIABLES, str(command)


def test_the_recipes_in_commands_exist_here_or_on_their_page() -> None:
    for command in programs("make"):
        for word in command.words:
            if word.startswith("RECIPES=") and word != "RECIPES=all":
                for recipe in word.partition("=")[2].split():
                    page = (ROOT / command.page).read_text()
                    assert recipe in recipes.names({}) or f"\n  {recipe}: {{" in page, recipe


def test_commands_are_accepted_by_their_own_parsers() -> None:
    """Modules without a command line get no options; all others parse theirs."""
    lines = [command.words for command in programs("dvc")]
    lines += [["python", "-m", "flows", *command.words[1:]] for command in programs("winnow")]
    for command in modules():
        name = command.words[2]
        if name == "pytest":
            continue
        if "argparse" in source(name).read_text() or "stage" in source(name).read_text():
            lines.append(command.words)
        else:
            assert command.words[3:] == [], str(command)
    started = [command.words for command in programs("docker") if command.words[1] == "run"]
    assert len(started) >= 3
    lines += [["python", "-m", "flows", *words[words.index("winnow") + 1 :]] for words in started]
    # `make run` forwards its ARGS
    for command in programs("make"):
        options = [word.partition("=")[2] for word in command.words if word.startswith("ARGS=")]
        if "run" in command.words:  # `make test` forwards them to pytest
            lines += [["python", "-m", "flows", "run", *shlex.split(text)] for text in options]
    with ProcessPoolExecutor(1, FORKS) as pool:
        assert pool.submit(refusals, [*map(list, dict.fromkeys(map(tuple, lines)))]).result() == []


class Accepted(BaseException):
    """An exception for a parsed command line."""


def refusals(lines: list[list[str]]) -> list[str]:
    """Return the commands that their own parsers refuse, with the reason. A module starts as with
    `python -m`, and stops when it has parsed its command line."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any, **more: Any) -> None:
        parse_args(self, *arguments, **more)
        raise Accepted

    argparse.ArgumentParser.parse_args = parse_and_stop
    return [found for words in lines if (found := refusal(words))]


def refusal(words: list[str]) -> str | None:
    """Return why the command is refused, or None."""
    output = io.StringIO()
    try:
        with redirect_stderr(output), redirect_stdout(output):
            if words[0] == "dvc":
                importlib.import_module("dvc.cli.parser").get_main_parser().parse_args(words[1:])
                return None
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except Accepted:
        return None
    except (Exception, SystemExit) as error:
        return f"{' '.join(words)}: {error!r} {output.getvalue()[-300:]}"
    return f"{' '.join(words)}: has no command line of argparse"


@pytest.mark.parametrize("command", programs("mlflow"), ids=str)
def test_mlflow_has_the_command_and_its_options(command: Command) -> None:
    text = (package("mlflow") / "cli" / "__init__.py").read_text()
    assert f"def {command.words[1]}(" in text
    for word in command.words[2:]:
        if word.startswith("--"):
            assert f'"{word}"' in text


def test_prefect_has_the_commands() -> None:
    """The test reads its source, as importing takes seconds."""
    folder = package("prefect") / "cli"
    for command in programs("prefect"):
        group = command.words[1].replace("-", "_")
        files = [folder / f"{group}.py", *folder.glob(f"{group}/*.py")]
        text = "".join(path.read_text() for path in files if path.exists())
        options = [word for word in command.words[2:] if word.startswith("--")]
        assert f'name="{group.replace("_", "-")}"' in text, str(command)
        assert all(f'"{option}"' in text for option in options if option != "--all"), str(command)
