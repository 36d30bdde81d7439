"""Where the time of a step goes, against the machine's rate of large float32 matrix products, and
the update with torch.compile (dynamic shapes).

    python -m tests.bench.machine [--steps 40] [--rounds 3] [--no-large]
    python -m tests.bench.machine --data smollm2 [--rounds 5]

For the embedded policy and the large one of `tests.bench.world`, on one thread, with groups of 8
and 32 rollouts a step. The parts of a run are wall seconds, for idle cores, and executed FLOPs.
Eager and compiled updates read the same rollouts and alternate, A B A B; values are medians of the
CPU seconds of the working thread, which other jobs on the same cores disturb least.

With `--data`, the policy and prompts of a data root on all cores, in wall seconds: 64 completions
of at most 64 tokens by each engine and dtype, and the gradient of these in each dtype."""

import argparse
import copy
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tasks.common.artifacts import PROMPTS, Layout
from tasks.engines.engine import Request
from tasks.engines.loading import load_engine
from tasks.engines.settings import EngineSettings, Sampling
from tasks.models.policy import load_tokenizer, read_policy
from tasks.models.prompts import encode_prompts
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.data.rollouts import Rollouts
from tasks.train.loop.loop import train
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings
from tests.bench.peak import in_new_process
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import make_world


def matmul_rate(size: int = 1024, repeats: int = 15) -> float:
    """Return the FLOPs per second of a product of two large matrices: the median."""
    one, other, times = torch.randn(size, size), torch.randn(size, size), list[float]()
    for _ in range(repeats):
        started = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - started)
    return 2.0 * size**3 / statistics.median(times)


def parts(root: Path, steps: int) -> Iterator[str]:
    """Yield a line for each part of a run: its time, and its FLOPs per second as a share of the
    rate of matrix products."""
    rates = [matmul_rate()]
    trainer = bench_trainer(root, 0)
    seconds, executed = trainer.state.seconds, trainer.state.ledger.executed
    checkpoints = Checkpoints(Layout(root).checkpoints, {}, keep=1)
    started = time.perf_counter()
    with closing(trainer.collector.grader):
        train(trainer, checkpoints, CheckpointSettings(1e9, 1), lambda *_: None)
    whole = time.perf_counter() - started
    rate = statistics.mean([*rates, matmul_rate()])
    yield f"matrix products: {rate / 1e9:.0f} GFLOP/s"
    for part in ("generate", "update"):
        share = executed[part] / seconds[part] / rate
        yield f"{part}: {1e3 * seconds[part] / steps:.1f} ms a step, {share:.0%} of that rate"
    rest = whole - seconds["generate"] - seconds["update"]
    yield f"rest: {1e3 * rest / steps:.1f} ms a step"


def sampled(trainer: Trainer, steps: int) -> Iterator[Rollouts]:
    """Yield the rollouts of the first steps, all of the initial policy."""
    for _ in range(steps):
        trainer.queue.fill(trainer.learner.version)
        (batch,) = trainer.queue.take(1)
        trainer.queue.observe(batch.step + 1)
        yield trainer.estimate(trainer.scored(batch.fresh), trainer.rng())


def seconds_of(trainer: Trainer, steps: list[Rollouts], model: Any) -> float:
    """Return the CPU seconds of the gradients of these steps."""
    learner = trainer.learner
    learner.model, started = model, time.thread_time()
    for rollouts in steps:
        learner.compute_gradient(rollouts, trainer.slots.loss)
    return time.thread_time() - started


def compare(root: Path, steps: int, rounds: int, backend: str) -> str:
    """Return the medians of both modes, and the seconds to compile."""
    trainer = bench_trainer(root, 0)
    with closing(trainer.collector.grader):
        rollouts = list(sampled(trainer, steps))
    models = {"eager": trainer.learner.model, "compiled": copy.deepcopy(trainer.learner.model)}
    models["compiled"].base_model.compile(dynamic=True, backend=backend)
    started = time.perf_counter()
    for _ in range(2):  # unforeseen shapes compile again
        seconds_of(trainer, rollouts, models["compiled"])
    first = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(seconds_of(trainer, rollouts, model))
    eager, compiled = (statistics.median(times[name]) for name in models)
    return (
        f"{1e3 * eager / steps:,.0f} ms a step, compiled {1e3 * compiled / steps:,.0f} ms "
        f"({compiled / eager - 1:+.0%}), compiled in {first - 2 * compiled:.1f} s"
    )


ENGINES = (("hf", "float32"), ("hf", "bfloat16"), ("vllm", "bfloat16"))


def generation_rate(data: Path, name: str, dtype: str) -> float:
    """Return the tokens per second of an engine, after a first call."""
    layout, threads = Layout(data), os.cpu_count() or 1
    torch.set_num_threads(threads)
    policy = read_policy(layout)
    table = PROMPTS.read(layout.prompts("train")).head(64)
    prompts = encode_prompts(table, load_tokenizer(policy.folder), policy, 64)
    settings = EngineSettings(name=name, device="cpu", dtype=dtype, threads=threads)
    engine = load_engine(settings, policy)
    engine.generate(Request(prompts[:8], [1] * 8, [*range(8)], Sampling(max_tokens=8)))
    started = time.perf_counter()
    found = engine.generate(Request(prompts, [1] * 64, [*range(64)], Sampling(max_tokens=64)))
    return sum(map(len, found.token_ids)) / (time.perf_counter() - started)


def gradient_rate(root: Path, dtype: str) -> float:
    """Return the tokens per second of a gradient, after a first one."""
    torch.set_num_threads(os.cpu_count() or 1)
    trainer = bench_trainer(root, 0, dtype=dtype)
    with closing(trainer.collector.grader):
        (rollouts,) = sampled(trainer, 1)
    for _ in range(2):
        started = time.perf_counter()
        trainer.learner.compute_gradient(rollouts, trainer.slots.loss)
        spent = time.perf_counter() - started
    with_gradient_B = trainer.learner.has_gradient(rollouts, trainer.slots.loss)
    return rollouts.rows(with_gradient_B).num_tokens / spent


def dtypes(data: Path, rounds: int) -> Iterator[str]:
    """Yield a line for each engine and dtype: the median, and its ratio to the first."""
    with tempfile.TemporaryDirectory() as folder:
        make_world(Path(folder) / "root", steps=1, rollouts=64, data=data)
        engines = [one for one in ENGINES if find_spec(one[0]) or one[0] == "hf"]
        sides = [(" ".join(one), generation_rate, data, *one) for one in engines]
        root = Path(folder) / "root"
        sides += [(f"gradient {one}", gradient_rate, root, one) for one in ("float32", "bfloat16")]
        rates = {name: list[float]() for name, *_ in sides}
        for _ in range(rounds):
            for name, function, *arguments in sides:
                rates[name].append(in_new_process(function, *arguments))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        first = medians["gradient float32" if "gradient" in name else "hf float32"]
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        yield f"{name}: {rate:,.0f} tokens/s ({spread}), {rate / first:.2f} times float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps of the tiny policy")
    parser.add_argument("--rounds", type=int, default=3, help="how often both alternate")
    parser.add_argument("--large", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--data", type=Path, help="a data root with a policy")
    options = parser.parse_args()
    if options.data:
        for line in dtypes(options.data, options.rounds):
            print(line, flush=True)
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in ("embedded", "large")[: 1 + options.large]:
        large, steps = name == "large", options.steps if name == "embedded" else 2
        with tempfile.TemporaryDirectory() as folder:
            make_world(Path(folder), steps=steps, large=large)
            for line in parts(Path(folder), steps):
                print(f"{name}: {line}", flush=True)
            print(f"{name}: {compare(Path(folder), steps, options.rounds, options.backend)}")


if __name__ == "__main__":
    main()
