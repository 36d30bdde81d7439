"""The shared parts of every stage's `__main__`: coordinates from the command line, logging,
tracking, and a correct exit status.

    python -m tasks.train --params params.yaml --data data --recipe sgpo --seed 0

The command line contains coordinates only. Values come from the parameter file. Under DVC, recipe
and seed come from the stage's name in DVC_STAGE (`train@sgpo-0`), because a shell would interpret
them in a `cmd`."""

import argparse
import atexit
import gc
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks.common import params, tracking
from tasks.common.files import ArtifactError, explain_write, require_writable
from tasks.common.inputs import Inputs, is_under_dvc, params_file
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.processes import ending, forks

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StageError(RuntimeError):
    """Raised if a stage cannot continue; the message contains the reason and the remedy."""


@dataclass(frozen=True)
class Stage:
    """One run of one stage: its coordinates, its parameters, the paths of its files, and its
    record."""

    name: str
    params: dict[str, Any]
    layout: Layout
    recipe: str | None
    seed: int | None
    options: argparse.Namespace
    tracker: tracking.Tracker
    inputs: Inputs | None = None  # under DVC

    @classmethod
    def unrecorded(
        cls,
        name: str,
        values: dict[str, Any],
        layout: Layout,
        recipe: str | None = None,
        seed: int | None = None,
    ) -> "Stage":
        """Return a run that is not recorded, for callers other than a stage's command."""
        options = argparse.Namespace(dry_run=False, resume=None, copy=False, before=[], cells=[])
        return cls(name, values, layout, recipe, seed, options, tracking.Tracker())

    def section(self, name: str, cls: type[T]) -> T:
        return params.section(self.params, name, cls)

    def check_inputs(self) -> None:
        """Raise ArtifactError if an input has changed since the start, under DVC. Every stage ends
        with this check; a stage that deletes what it would resume from calls it before."""
        if self.inputs:
            self.inputs.check()

    def coordinates(self) -> tuple[str, int]:
        """Return the recipe and the seed, for a stage that has both."""
        assert self.recipe is not None
        assert self.seed is not None
        return self.recipe, self.seed

    @property
    def dvc_locks(self) -> list[Path]:
        """Return the files in which DVC records this run; none if it runs without DVC."""
        if "DVC_STAGE" not in os.environ:
            return []
        return [Path("dvc.lock"), self.layout.root / "dvc.lock"]

    def sections(self, cls: type[T]) -> T:
        return params.sections(self.params, cls)


def run(
    module: str,
    *,
    of_cell: bool = False,
    alone: str | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    before: Callable[[argparse.Namespace], None] | None = None,
) -> None:
    """Run `main(Stage)` of a stage's module, such as tasks.train.run. Exit with 0, with 130 if
    interrupted, or with the `status` of an expected error (by default 1), which is logged.

    The module is imported in the process that does the work (see `forks`), after `before` has run
    there with its own imports. A stage `of_cell` has a recipe and a seed. They are required unless
    `alone` is given: it names the stage that the module runs without them."""
    name = module.split(".")[1]
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{name}")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file")
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="data root; nothing is written outside it"
    )
    if of_cell:
        parser.add_argument("--recipe", help="a recipe's name")
        parser.add_argument("--seed", type=int)
    if options:
        options(parser)
    arguments = parser.parse_args()
    arguments.params = params_file(Layout(arguments.data), arguments.params)
    if of_cell:
        set_cell(parser, arguments, alone)
    atexit.register(gc.freeze)  # else Python collects torch's garbage at exit: two seconds
    status = forks.run_forked(f"tasks.{name}")
    if status is not None:
        sys.exit(status)
    if before:
        before(arguments)
    name = alone if alone and arguments.recipe is None else name
    rank = os.environ.get("RANK", "0")  # rank 0 logs progress, every rank logs warnings
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format=f"%(asctime)s {name}{'' if rank == '0' else f' (rank {rank})'}: %(message)s",
        datefmt="%H:%M:%S",
    )
    for noisy in ("httpx", "httpx2", "alembic", "mlflow", "httpcore", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    ending.interrupt_on_terminate()
    sys.exit(_run(name, module, arguments))


def set_cell(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, alone: str | None
) -> None:
    """If recipe and seed are missing, read them from DVC_STAGE. Exit if either is still missing,
    unless the stage's name is `alone`."""
    named = os.environ.get("DVC_STAGE", "").rpartition(":")[2]  # without another root's file name
    if (arguments.recipe, arguments.seed) == (None, None):
        name, arguments.recipe, arguments.seed = params.coordinates(named or alone or "")
        if name == alone:
            return
    if None in (arguments.recipe, arguments.seed):
        parser.error(
            f"set both --recipe and --seed; DVC's name of this stage, {named!r}, has no recipe "
            "with a whole number as seed"
        )


def _run(name: str, module: str, arguments: argparse.Namespace) -> int:
    recipe, seed = getattr(arguments, "recipe", None), getattr(arguments, "seed", None)
    started = time.perf_counter()
    layout = Layout(arguments.data)
    # only rank 0 of a stage writes the record; a dry run and an unfinished report write none
    is_dry = getattr(arguments, "dry_run", False) or getattr(arguments, "cells", [])
    is_main = os.environ.get("RANK", "0") == "0" and not is_dry
    try:
        if recipe is not None:
            params.check_recipe(recipe, "--recipe")
        params.at_least(0, __seed=seed or 0)
        under_dvc = is_main and is_under_dvc(layout)
        inputs = Inputs.at_start(layout, name, recipe, seed) if under_dvc else None
        main: Callable[[Stage], None] = importlib.import_module(module).main
        values = params.load(arguments.params)
        settings = params.section(values, "tracking", tracking.Tracking)
        for place in layout.written_by(name, recipe, seed) if is_main else ():
            require_writable(place)  # now, not after hours of work
        record = (
            tracking.track(settings, layout, name, recipe, seed)
            if is_main
            else nullcontext(tracking.Tracker())
        )
        with record as tracker:
            stage = Stage(name, values, layout, recipe, seed, arguments, tracker, inputs)
            main(stage)
            stage.check_inputs()
    except KeyboardInterrupt:
        logger.warning("interrupted; run the same command again to resume")
        return ending.interrupted()
    except (ParamsError, ArtifactError, StageError) as error:
        logger.error("%s", error)
        return getattr(error, "status", 1)
    except Exception as error:
        message = explain_write(error, arguments.data)
        if message is None:
            raise
        logger.error("%s", message)
        return 1
    logger.info("done in %.1f s (pid %d)", time.perf_counter() - started, os.getpid())
    return 0
