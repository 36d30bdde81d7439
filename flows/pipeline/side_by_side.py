"""Run stages side by side, up to a limit, each with its own dvc process. If there are several GPUs
and stages need only one each, every stage that uses a GPU gets the least used one.

With a limit of one, everything runs in the flow's thread, which signals can interrupt. Otherwise
each stage has a thread and the flow's thread waits; an interrupt makes all stages save and stop."""

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

from flows.doctor import nvidia
from flows.pipeline import commands
from tasks.common import params

T = TypeVar("T")

POLL_SECONDS = 0.1
ON_DEVICE = {"profile", "baseline", "train", "evaluate"}  # the others never use a GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class Placing:
    """The GPUs for stages, as in CUDA_VISIBLE_DEVICES, and how many stages use each of them."""

    gpus: list[str]
    each: int  # GPUs per stage
    is_split: bool  # whether each stage gets its own GPU
    users: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, values: Mapping[str, Any], concurrency: int) -> "Placing":
        """Return a Placing on the GPUs that the section `engine` and this machine allow."""
        engine = values.get("engine") or {}
        is_cluster = engine.get("cluster", "local") != "local"
        gpus = visible_gpus() if engine.get("device") != "cpu" and not is_cluster else []
        trainers, servers = engine.get("num_processes", 1), engine.get("num_replicas", 1)
        is_server = engine.get("name") == "server" or servers > 1
        has_servers = is_server and not engine.get("urls")
        each = trainers + servers if has_servers else max(trainers, servers)
        return cls(gpus, each, concurrency > 1 and each == 1 and len(gpus) > 1)

    def take(self, stage: str) -> list[str]:
        """Return a stage's GPUs, if any: the least used one if split, else the first `each`."""
        if params.coordinates(stage)[0] not in ON_DEVICE:
            return []
        if not self.is_split:
            return self.gpus[: self.each]
        gpu = min(self.gpus, key=lambda one: self.users[one])
        self.users[gpu] += 1
        return [gpu]

    def environment(self, taken: list[str]) -> dict[str, str]:
        """Return the variable that restricts a stage to its GPU, or nothing if it may use all."""
        return {VISIBLE: taken[0]} if self.is_split and taken else {}


def visible_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs of this machine if it is not set."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in {"", "-1"}]
    return [str(number) for number in range(len(nvidia.gpus()))]


def tags(taken: list[str]) -> set[str]:
    """Return Prefect's tags for a stage's devices. Prefect can limit concurrency by tag."""
    return {f"{commands.NAME}:{gpu}" for gpu in [f"cuda:{gpu}" for gpu in taken] or ["cpu"]}


def here(work: Callable[[], T]) -> Future[T]:
    """Run `work` in this thread, and return its result as a completed future."""
    future: Future[T] = Future()
    future.set_result(work())
    return future


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, which cannot keep the process alive. Return its future."""
    future: Future[T] = Future()
    context = copy_context()  # the context of the flow run

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class Running:
    """The running stages, at most `concurrency` at a time. `first` is the flow's own dvc process;
    more are started on demand."""

    def __init__(self, first: commands.Dvc, concurrency: int, parameters: Path) -> None:
        self.concurrency = concurrency
        self.placing = Placing.of(params.load(parameters), concurrency)
        self.shared = dict(first.extra)
        self.dvcs = [first]
        self.idle = [first]
        self.stages: dict[Future[Any], tuple[str, commands.Dvc, list[str]]] = {}

    @property
    def room(self) -> int:
        return self.concurrency - len(self.stages)

    def start(
        self, stage: str, title: str, work: Callable[[commands.Dvc, set[str]], object]
    ) -> None:
        """Start the work of a stage with its own dvc process and the tags of its devices. A new dvc
        starts in this thread, because the kernel kills it when the thread that started it ends."""
        if not self.idle:
            self.idle.append(commands.Dvc(is_labelled=self.concurrency > 1))
            self.dvcs += self.idle
        dvc = self.idle.pop()
        taken = self.placing.take(stage)
        dvc.extra = {**self.shared, **self.placing.environment(taken)}
        dvc.output.label = title
        submit = here if self.concurrency == 1 else in_thread
        self.stages[submit(lambda: work(dvc, tags(taken)))] = (stage, dvc, taken)

    def ended(self) -> Iterator[tuple[str, Any]]:
        """Wait for POLL_SECONDS at most, and yield every ended stage with the result of its work.
        Raise the exceptions of the work."""
        done, _ = wait(self.stages, POLL_SECONDS, FIRST_COMPLETED)
        for future in done:
            stage, dvc, taken = self.stages.pop(future)
            self.placing.users.subtract(taken)
            if dvc.child.poll() is None:
                self.idle.append(dvc)
            yield stage, future.result()


@contextmanager
def running(first: commands.Dvc, concurrency: int, parameters: Path) -> Iterator[Running]:
    """Yield a Running for stages on the devices that the parameter file allows. On an exception in
    the block, stop all stages, and wait up to GRACE_SECONDS until they are recorded."""
    this = Running(first, concurrency, parameters)
    with ExitStack() as stack:
        try:
            yield this
        except BaseException:
            commands.end_all(this.dvcs, interrupt=True)
            wait(this.stages, commands.GRACE_SECONDS)  # until the stages are recorded
            raise
        finally:
            for dvc in this.dvcs[1:]:
                stack.push(dvc)
