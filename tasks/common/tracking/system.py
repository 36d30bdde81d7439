"""How busy the machine is while a stage runs: MLflow's system metrics, sampled here and sent with
the stage's own, so that they take the same way when the server is away."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tasks.common.journal import Tracker

logger = logging.getLogger(__name__)

SECONDS = 10.0  # between two samples; a shorter stage has none


@contextmanager
def watched(tracker: Tracker) -> Iterator[None]:
    """Sample in a thread until the block ends. The tracker's own thread sends the samples."""
    ended = threading.Event()
    thread = threading.Thread(target=sample, args=(tracker, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def sample(tracker: Tracker, ended: threading.Event) -> None:
    """Add a point every SECONDS. A metric that cannot be read ends it: a stage goes on."""
    with suppress(Exception):
        psutil.cpu_percent()  # the first call returns nothing
        number = 0
        while not ended.wait(SECONDS):
            values = {f"system/{name}": value for name, value in usage().items()}
            tracker.add(values, number)
            number += 1


def usage() -> dict[str, float]:
    """Processor, memory and disk of the machine, by MLflow's names; and its GPUs, where MLflow can
    see them."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    return {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        **gpu_usage(),
    }


def gpu_usage() -> dict[str, float]:
    """MLflow's figures of the GPUs; none where it finds no GPU, or nothing to ask it with."""
    try:
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

        monitor = GPUMonitor()
        monitor.collect_metrics()
        return {name: float(value) for name, value in monitor.aggregate_metrics().items()}
    except Exception as error:
        logger.debug("no figures of a GPU: %s", error)
        return {}
