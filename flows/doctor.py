"""winnow doctor: everything that can be wrong is looked for before the first minute is spent.

The parameters with all slots of the chosen recipes, model and data, store and record, disk and GPU
memory. Nothing is downloaded, and torch is not imported. The flow looks in the same way before the
first stage that is stale."""

import argparse
import configparser
import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from flows import commands, roots, server
from flows.roots import Root
from flows.stages import Stages
from tasks.common.files import WriteError, require_writable
from tasks.common.params import ParamsError


class DoctorError(ParamsError):
    """The pipeline would fail; the message lists every reason."""


def findings(root: Root) -> Any:
    """What is wrong with a data root, as `tasks.doctor.check.Findings`: flows import no stage, so
    it is loaded by name. And what DVC and Prefect could not write."""
    check = importlib.import_module("tasks.doctor.check")
    with contextlib.chdir(commands.ROOT):  # where the stages run: a path may be relative to it
        found = check.examine(root.params, root.layout)
    for folder in written_beside():
        try:
            require_writable(folder)
        except WriteError as error:
            found.errors.append(str(error))
    found.errors.extend(commands.broken_locks())
    return found


def written_beside() -> list[Path]:
    """What is written beside the data root: DVC's cache and its notes, and Prefect's database
    where no lasting server has one."""
    dvc, config = commands.ROOT / ".dvc", configparser.ConfigParser()
    config.read([dvc / "config", dvc / "config.local"])
    cache = dvc / config.get("cache", "dir", fallback="cache", raw=True).strip()
    return [dvc / "tmp", cache, *([] if server.named_url() else [server.home()])]


def require_health(root: Root) -> None:
    """Raise DoctorError with everything that is wrong."""
    found = findings(root)
    for remark in found.remarks:
        print(f"note: {remark}", file=sys.stderr, flush=True)
    if found.errors:
        raise DoctorError(f"refused: {listed(found.errors)}")


def examine(
    dvc: commands.Dvc, root: Root, recipes: list[str], seeds: list[str], force: list[str]
) -> Stages:
    """The stages of a request. Raises DoctorError where there is something to run and something
    wrong."""
    try:
        stages = Stages.examine(dvc, root, recipes, seeds, force)
    except (commands.CommandError, ParamsError):
        require_health(root)  # DVC and the stage `code` stop at the first thing that is wrong
        raise
    if not stages.idle:
        require_health(root)
    return stages


def listed(errors: list[str]) -> str:
    count = "1 thing is wrong" if len(errors) == 1 else f"{len(errors)} things are wrong"
    return "\n".join([f"{count}:", *(f"- {error}" for error in errors)])


def add_options(parser: argparse.ArgumentParser) -> None:
    roots.add_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print what is wrong: 1 where something is."""
    return say(roots.existing(options.data))


def say(root: Root) -> int:
    """As `run`, of a root."""
    found = findings(root)
    for remark in found.remarks:
        print(f"note: {remark}")
    if found.errors:
        print(listed(found.errors))
        return 1
    print("nothing is wrong: parameters, recipes, model, data, store, record, disk and GPU memory")
    return 0
