"""Measure what HTTP costs: answers per second of `winnow grade`, as a share of the grader's rate in
the same batches.

    python -m tests.bench.grade_service [--batch 256] [--batches 200] [--processes 2]

The service is a process of its own, and the client is the exported `reward.py`. There is one
request at a time, so that nothing hides its latency. Answers are correct, after a text as long as
the answers of GSM8K (about 300 characters). Both ways alternate, and the fastest batch counts,
because other programs slow the others down. The share of the CPU time of all processes depends less
on them: it is what HTTP costs where the processors are busy."""

import argparse
import json
import math
import os
import runpy
import tempfile
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
import polars as pl
import psutil

from tasks.common import params
from tasks.common.artifacts import PROMPTS, Layout
from tasks.common.processes.ports import free_port
from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.policy.source import EMBEDDED
from tasks.train.external import service
from tasks.train.external.export import FILES
from tests.bench.grading import WORK, seconds
from tests.patience import wait_for
from tests.train.worlds import make_world, write_params

RIGHT = {"numeric": "7", "math": r"\boxed{7}"}


def measure(grader: Grader, verifier: str, batch: int, batches: int) -> list[float]:
    """Return the answers per second of the grader and of the service, and the CPU seconds of all
    batches of each."""
    grade = runpy.run_path(str(FILES / "reward.py.txt"))["grade"]
    prompt = f"p{list(RIGHT).index(verifier)}"
    label = json.dumps({"prompt_id": prompt, "verifier": verifier, "answer": "7"})
    text = WORK + RIGHT[verifier]
    direct = partial(grader.grade, [Answer(verifier, text, "7", False)] * batch)
    served = partial(grade, [(text, label)] * batch)
    assert {verdict.reward for verdict in direct()} == set(served()) == {1.0}
    fastest, cpu = [math.inf, math.inf], [0.0, 0.0]
    for _ in range(batches):
        for way, work in enumerate((direct, served)):
            before = cpu_seconds()
            fastest[way] = min(fastest[way], seconds(work))
            cpu[way] += cpu_seconds() - before
    return [*(batch / spent for spent in fastest), *cpu]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it started and that still run."""
    process = psutil.Process()
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(float(each.user + each.system) for each in times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layout = make_world(Path(folder), EMBEDDED.policy, [2, 2])
        write_params(layout, verify={"processes": options.processes})
        names = pl.Series([*RIGHT, *["numeric"] * (6 - len(RIGHT))])
        table = PROMPTS.read(layout.prompts("train"))
        PROMPTS.write(layout.prompts("train"), table.with_columns(verifier=names))
        port = free_port()
        os.environ["WINNOW_GRADER"] = address = f"http://127.0.0.1:{port}"
        process = get_context("spawn").Process(target=serve, args=(Path(folder), port))
        process.start()
        try:
            wait_for(lambda: is_up(address) or not process.is_alive())
            print(f"{'verifier':10} {'grader/s':>10} {'service/s':>10} {'less':>6} {'of CPU':>8}")
            with Grader(Verify(options.processes, 20.0, 4.0, 1.0, {})) as grader:
                for name in RIGHT:
                    found = measure(grader, name, options.batch, options.batches)
                    alone, served, cpu_alone, cpu_served = found
                    of_cpu = 1 - cpu_alone / cpu_served if cpu_served else math.nan  # a few ticks
                    shares = f"{1 - served / alone:6.0%} {of_cpu:8.0%}"
                    print(f"{name:10} {alone:10,.0f} {served:10,.0f} {shares}", flush=True)
        finally:
            process.terminate()
            process.join()


def serve(folder: Path, port: int) -> None:
    values = params.load(folder / "params.yaml")
    with service.opened(values, Layout(folder)) as grading:
        service.serve(grading, "127.0.0.1", port, None)


def is_up(address: str) -> bool:
    """Return whether the service is up."""
    try:
        return httpx.post(f"{address}/grade", json=[]).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
