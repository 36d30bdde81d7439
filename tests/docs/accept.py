"""List the commands that their own parsers refuse: lists of words as JSON on standard streams.

    python -m tests.docs.accept < commands.json

A module starts as with `python -m`, and stops when it has parsed its command line. All modules run
in one process, and stand-ins replace libraries that take seconds to import."""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import runpy
import sys
from types import ModuleType
from typing import Any

SLOW = ("torch", "transformers", "s3fs", "aiohttp", "reasoning_gym", "prefect", "mlflow")
parse_args = argparse.ArgumentParser.parse_args


class Attributes(type):
    """A metaclass that gives a class any attribute."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(Anything(), name)


class Thing(metaclass=Attributes):
    """A class of a stand-in."""

    def __init__(self, *arguments: Any, **more: Any) -> None: ...

    def __class_getitem__(cls, key: Any) -> Any:
        return cls


class Anything:
    """The value, the result and the decorator of a stand-in's functions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Attributes(name, (Thing,), {}) if name[0].isupper() else self

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the slow libraries before Python does."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in SLOW:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = Anything().__getattr__  # type: ignore[method-assign]


class Accepted(BaseException):
    """An exception for a parsed command line."""


def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any, **more: Any) -> None:
    parse_args(self, *arguments, **more)
    raise Accepted


def module(name: str, *arguments: str) -> None:
    """Run `python -m name arguments`."""
    sys.argv = [name, *arguments]
    with contextlib.suppress(Accepted):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        raise SystemExit(f"{name} has no command line of argparse")


def dvc(*arguments: str) -> None:
    from dvc.cli.parser import get_main_parser

    with contextlib.suppress(Accepted):
        get_main_parser().parse_args(arguments)


def refusal(words: list[str]) -> str | None:
    """Return why the command is refused, or None."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            if words[:2] == ["python", "-m"]:
                module(*words[2:])
            else:
                dvc(*words[1:])
    except (Exception, SystemExit) as error:
        return f"{' '.join(words)}: {error!r} {output.getvalue()[-300:]}"
    return None


if __name__ == "__main__":
    sys.meta_path.insert(0, StandIns())
    commands = json.load(sys.stdin)
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment, method-assign]
    print(json.dumps([found for words in commands if (found := refusal(words))]))
