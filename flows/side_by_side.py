"""Stages side by side, up to a limit: a dvc process for each, and a GPU where there are several.

With a limit of one everything runs in the thread of the flow, which signals interrupt. With more,
each stage runs in a thread of its own, and the flow's waits: what interrupts it ends all stages at
once, and each saves what it has."""

import argparse
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from flows import commands
from tasks.common import params

T = TypeVar("T")

POLL_SECONDS = 0.1
ON_DEVICE = {"profile", "baseline", "train", "evaluate"}  # the others never use a GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"


def number(text: str) -> int:
    """How many, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of stages: 1 or more")
    return int(text)


def add_options(parser: argparse.ArgumentParser, concurrency: int) -> None:
    """The option that says how many stages run at once."""
    parser.add_argument(
        "--concurrency",
        type=number,
        default=concurrency,
        metavar="N",
        help="how many stages may run side by side (default: %(default)s)",
    )


@dataclass
class Placing:
    """The GPUs that stages may use, as CUDA_VISIBLE_DEVICES names them, and who uses which."""

    gpus: list[str]
    each: int  # GPUs that one stage takes
    is_split: bool  # whether each stage is given a GPU of its own
    users: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, values: Mapping[str, Any], concurrency: int) -> "Placing":
        """What the section `engine` and this machine allow."""
        engine = values.get("engine") or {}
        is_elsewhere = engine.get("cluster", "local") != "local"
        gpus = visible_gpus() if engine.get("device") != "cpu" and not is_elsewhere else []
        trainers, servers = engine.get("num_processes", 1), engine.get("num_replicas", 1)
        is_server = engine.get("name") == "server" or servers > 1
        has_servers = is_server and not engine.get("urls")
        each = trainers + servers if has_servers else max(trainers, servers)
        return cls(gpus, each, concurrency > 1 and each == 1 and len(gpus) > 1)

    def take(self, stage: str) -> list[str]:
        """The GPUs for a stage; of several, where it needs one, one that the fewest others have."""
        if params.coordinates(stage)[0] not in ON_DEVICE:
            return []
        if not self.is_split:
            return self.gpus[: self.each]
        gpu = min(self.gpus, key=lambda one: self.users[one])
        self.users[gpu] += 1
        return [gpu]

    def give_back(self, taken: list[str]) -> None:
        self.users.subtract(taken)

    def environment(self, taken: list[str]) -> dict[str, str]:
        """What a stage is told of its GPU; nothing where it may see them all."""
        return {VISIBLE: taken[0]} if self.is_split and taken else {}


def visible_gpus() -> list[str]:
    """The GPUs of this machine, or those of them that CUDA_VISIBLE_DEVICES names."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in {"", "-1"}]
    machine = importlib.import_module("tasks.doctor.machine")  # flows import no stage
    return [str(number) for number in range(len(machine.gpus()))]


def tags(taken: list[str]) -> set[str]:
    """What Prefect calls the devices of a stage: its limits go by tag."""
    return {f"device:cuda:{gpu}" for gpu in taken} or {"device:cpu"}


def here(work: Callable[[], T]) -> Future[T]:
    """Do it now, in this thread."""
    future: Future[T] = Future()
    future.set_result(work())
    return future


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do it in a thread, which keeps nothing from ending: what it waits for may be somewhere
    else."""
    future: Future[T] = Future()
    context = copy_context()  # it belongs to the flow run

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class Running:
    """The stages that run, at most `concurrency` at a time. The first dvc process is the flow's;
    others are started when they are needed."""

    def __init__(self, first: commands.Dvc, concurrency: int, parameters: Path) -> None:
        self.concurrency = concurrency
        self.placing = Placing.of(params.load(parameters), concurrency)
        self.shared = dict(first.extra)
        self.dvcs = [first]
        self.idle = [first]
        self.stages: dict[Future[Any], tuple[str, commands.Dvc, list[str]]] = {}

    @property
    def room(self) -> int:
        """How many more may start."""
        return self.concurrency - len(self.stages)

    def start(
        self, stage: str, title: str, work: Callable[[commands.Dvc, set[str]], object]
    ) -> None:
        """Do the work of a stage, given a dvc process of its own and the tags of its devices. That
        process is started in this thread: the kernel ends it with the thread that started it."""
        dvc = self.idle.pop() if self.idle else self.another()
        taken = self.placing.take(stage)
        dvc.extra = {**self.shared, **self.placing.environment(taken)}
        dvc.output.label = title
        submit = here if self.concurrency == 1 else in_thread
        self.stages[submit(lambda: work(dvc, tags(taken)))] = (stage, dvc, taken)

    def another(self) -> commands.Dvc:
        """One more dvc process."""
        dvc = commands.Dvc(is_labelled=self.concurrency > 1)
        self.dvcs.append(dvc)
        return dvc

    def ended(self) -> Iterator[tuple[str, Any]]:
        """Every stage that has ended, with what its work returned, after a moment. Raises what it
        raised."""
        done, _ = wait(self.stages, POLL_SECONDS, FIRST_COMPLETED)
        for future in done:
            stage, dvc, taken = self.stages.pop(future)
            self.placing.give_back(taken)
            if dvc.child.poll() is None:
                self.idle.append(dvc)
            yield stage, future.result()


@contextmanager
def running(first: commands.Dvc, concurrency: int, parameters: Path) -> Iterator[Running]:
    """Stages side by side; the parameter file says what they compute on. Whatever interrupts the
    block ends all of them and waits for each."""
    this = Running(first, concurrency, parameters)
    with ExitStack() as stack:
        try:
            yield this
        except BaseException:
            commands.end_all(this.dvcs, interrupt=True)
            wait(this.stages, commands.GRACE_SECONDS)  # until they are recorded
            raise
        finally:
            for dvc in this.dvcs[1:]:
                stack.push(dvc)
