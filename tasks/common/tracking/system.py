"""The machine's load while a stage runs: MLflow's system metrics, sampled here and sent with the
stage's own metrics, so that they go to the same file if the server fails."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from tasks.common.tracking.journal import Tracker

logger = logging.getLogger(__name__)

SECONDS = 10.0  # between two samples; a shorter stage has none
PREFIX = "system/"  # of the metrics' names


@contextmanager
def watched(tracker: Tracker) -> Iterator[None]:
    """Sample the machine's load in a thread until the block ends; the tracker sends the samples."""
    ended = threading.Event()
    thread = threading.Thread(target=sample, args=(tracker, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def sample(tracker: Tracker, ended: threading.Event) -> None:
    """Record the machine's load every SECONDS. An exception ends the sampling, not the stage."""
    with suppress(Exception):
        psutil.cpu_percent()  # the first call returns nothing
        number = 0
        while not ended.wait(SECONDS):
            values = {f"{PREFIX}{name}": value for name, value in usage().items()}
            tracker.add(values, number)
            number += 1


def usage() -> dict[str, float]:
    """Return MLflow's metrics of processor, memory and disk, and of GPUs if MLflow finds any and
    has a library to query them."""
    from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, gpu_monitor

    found = dict[str, float]()
    for kind in (cpu_monitor.CPUMonitor, disk_monitor.DiskMonitor, gpu_monitor.GPUMonitor):
        try:
            monitor: Any = kind()
            monitor.collect_metrics()
            found |= monitor.aggregate_metrics()
        except Exception as error:
            logger.debug("cannot measure the load of this machine: %s", error)
    return {name: float(value) for name, value in found.items()}


def is_load(name: str) -> bool:
    return name.startswith(PREFIX)
