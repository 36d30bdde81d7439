"""Profile Winnow's time: tokens per second relative to this machine's float32 matmul rate, and a
step by parts.

    python -m tests.bench.throughput [--steps 40] [--no-large] [--no-compile]

For the embedded policy and the large one of `tests.bench.world`, on one thread. The matmul rate is
measured around each part. Compared settings see the same rollouts and alternate, A B A B; values
are medians. Shares are executed FLOPs (from the ledger) per second, divided by that rate: 100 % is
a program of only large matrix products. Seconds are CPU seconds of the working thread, which other
jobs on the same cores disturb least. Grading runs in a thread beside the step, with the verifier in
a separate process, which is not measured."""

import argparse
import copy
import dataclasses
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.engines.engine import Request, Samples
from tasks.engines.hf import engine as hf
from tasks.train.learner.correction import corrected_tokens
from tasks.train.learner.micro_batches import MicroBatch, micro_batches
from tasks.train.learner.update import Objective, batch_flops, token_logprobs
from tasks.train.loop.charge import charge
from tasks.train.loop.state import State
from tasks.train.loop.trainer import Trainer
from tasks.train.rollouts import Rollouts, StepTotals
from tests.bench.clock import Stopwatch, peak_megabytes
from tests.bench.side_winnow import bench_trainer
from tests.bench.tables import table
from tests.bench.world import make_world

GROUP_SIZE = 8


def matmul_rate(size: int = 1024, repeats: int = 15) -> float:
    """Return FLOPs per second of a product of two large square float32 matrices, on one thread: the
    median."""
    a, b, watch = torch.randn(size, size), torch.randn(size, size), Stopwatch()
    for _ in range(repeats):
        with watch.measure("matmul"):
            a @ b
    return 2.0 * size**3 / watch.median("matmul")


def run_steps(trainer: Trainer, steps: int) -> tuple[Stopwatch, list[Rollouts]]:
    """Run `steps` training steps after a warm-up. Return their seconds by part and rollouts."""
    watch, rollouts = Stopwatch(), []
    step(trainer, Stopwatch())
    trainer.state = State(num_steps=trainer.state.num_steps)
    engine: Any = trainer.collector.engine
    grader: Any = trainer.collector.grader.grader
    optimizer: Any = trainer.learner.optimizer
    engine.generate = watch.wrap("generate", engine.generate)
    grader.grade = watch.wrap("grade", grader.grade)
    optimizer.step = watch.wrap("optimizer", optimizer.step)
    for _ in range(steps):
        rollouts.append(step(trainer, watch))
    for owner, name in ((engine, "generate"), (grader, "grade"), (optimizer, "step")):
        delattr(owner, name)
    return watch, rollouts


def step(trainer: Trainer, watch: Stopwatch) -> Rollouts:
    """Run one training step, as `tasks.train.loop.loop.train` does."""
    with watch.measure("step"):
        trainer.buffer.reserve(trainer.buffer.num_sampled + 1)
        trainer.buffer.fill(trainer.learner.version)
        (batch,) = trainer.buffer.take(1)
        rollouts, rate = batch.fresh, trainer.learning_rate(batch.progress)
        rng = trainer.rng()
        rollouts = trainer.observe_policy(rollouts)
        rollouts = trainer.estimate(rollouts, rng)
        with watch.measure("update"):
            update = trainer.update(rollouts, rate, rng)
            if update.norms:
                trainer.sync_engine()
        trainer.buffer.observe(batch.step + 1)
        trainer.slots.advantage.observe(rollouts)
        trainer.slots.replay.add(batch.fresh)
        charge(trainer, batch, rollouts, update)
        trainer.record(batch, rollouts, update, rate)
    return rollouts


def step_parts(watch: Stopwatch, passes: Stopwatch) -> dict[str, float]:
    """Return the seconds of all steps by part. Forward and backward are measured separately, on the
    same rollouts."""
    update = {
        "update: forward": passes.total("forward"),
        "update: backward": passes.total("backward"),
        "update: optimizer": watch.total("optimizer"),
    }
    rest = max(watch.total("update") - sum(update.values()), 0.0)
    parts = {"generate": watch.total("generate"), **update}
    parts["update: batches, clipping, statistics"] = rest
    parts["advantages, record, ledger, seeds"] = max(watch.total("step") - sum(parts.values()), 0.0)
    parts["grade, beside the step"] = watch.total("grade")
    return parts


def batches_of(trainer: Trainer, rollouts: Rollouts, objective: Objective) -> list[MicroBatch]:
    """Return the micro-batches of groups with a gradient, as the trainer makes them."""
    rows = np.flatnonzero(trainer.slots.advantage(rollouts))
    limit = trainer.learner.memory.max_tokens_per_micro_batch
    if not len(rows):
        return []
    return micro_batches(
        rollouts, rows, limit, trainer.learner.model.device, by_group=objective.share_prompts
    )


def update_passes(
    trainer: Trainer, steps: list[Rollouts], watch: Stopwatch, *, share: bool, model: Any = None
) -> dict[str, float]:
    """Run forward and backward over the steps' rollouts, without the optimizer, and return FLOPs
    and completion tokens."""
    model = trainer.learner.model if model is None else model
    objective = dataclasses.replace(
        trainer.learner.objective(trainer.slots.loss), share_prompts=share
    )
    sums: dict[str, float] = defaultdict(float)
    for rollouts in steps:
        advantages_B = trainer.slots.advantage(rollouts)
        tokens = int(rollouts.completion_tokens_B().sum())
        totals = StepTotals(tokens, len(rollouts.group_B), trainer.run.sampling.max_tokens)
        for batch in batches_of(trainer, rollouts, objective):
            with watch.measure("forward"):
                logprobs_N, _ = token_logprobs(model, batch, objective)
                gains_N = torch.from_numpy(advantages_B[batch.rows]).to(logprobs_N)[batch.row_N]
                seen, _ = corrected_tokens(
                    logprobs_N,
                    logprobs_N.detach(),
                    batch.sampler_logprobs_N,
                    gains_N,
                    batch.row_N,
                    len(batch.rows),
                    objective.correction,
                )
                loss, _ = objective.loss(seen, totals)
            with watch.measure("backward"):
                loss.backward()
            sums["tokens"] += len(batch.targets_N)
            sums["flops"] += 3.0 * sum(batch_flops(trainer.run.policy.architecture, batch, share))
        model.zero_grad(set_to_none=True)
    return sums


def compare_batches(trainer: Trainer, steps: list[Rollouts], rounds: int) -> list[dict[str, Any]]:
    """Compare the update with each prompt read once and with every rollout read whole."""
    watch, found = Stopwatch(), {}
    for _ in range(rounds):
        for name, share in (("each prompt read once", True), ("every rollout read whole", False)):
            with watch.measure(name):
                found[name] = update_passes(trainer, steps, Stopwatch(), share=share)
    return [row(name, watch.median(name), sums, len(steps)) for name, sums in found.items()]


def compare_compiled(trainer: Trainer, steps: list[Rollouts], rounds: int) -> list[dict[str, Any]]:
    """Compare the update in eager mode and with torch.compile (dynamic shapes)."""
    compiled, watch, found = copy.deepcopy(trainer.learner.model), Stopwatch(), {}
    compiled.base_model.compile(dynamic=True)
    started = time.perf_counter()
    for _ in range(2):  # unforeseen shapes compile again
        update_passes(trainer, steps, Stopwatch(), share=True, model=compiled)
    first = time.perf_counter() - started
    for _ in range(rounds):
        for name, model in (("eager", trainer.learner.model), ("torch.compile", compiled)):
            with watch.measure(name):
                found[name] = update_passes(trainer, steps, Stopwatch(), share=True, model=model)
    rows = [row(name, watch.median(name), found[name], len(steps)) for name in found]
    rows[1]["compile, s"] = first - 2 * watch.median("torch.compile")
    return rows


def row(name: str, seconds: float, sums: dict[str, float], steps: int) -> dict[str, Any]:
    """Return one line of a table on the update."""
    return {
        "update": name,
        "ms a step": 1e3 * seconds / steps,
        "completion tokens/s": sums["tokens"] / seconds,
        "GFLOPs a step": sums["flops"] / steps / 1e9,
    }


def draw(trainer: Trainer, num_prompts: int, max_rows: int) -> Samples:
    """Return one group of completions per prompt, at most `max_rows` in flight."""
    engine = trainer.collector.engine
    assert isinstance(engine, hf.HfEngine)
    engine.max_rows = max_rows
    prompts, count = trainer.prompts.token_ids(np.arange(num_prompts)), num_prompts * GROUP_SIZE
    return engine.generate(
        Request(prompts, [GROUP_SIZE] * num_prompts, range(count), trainer.run.sampling)
    )


def compare_generation(trainer: Trainer, rounds: int) -> list[dict[str, Any]]:
    """Compare tokens per second by rollouts drawn at once, and by rows in flight."""
    cases = [(prompts, 256) for prompts in (4, 8, 16, 32, 64)]
    cases += [(32, rows) for rows in (32, 64, 128)]
    watch, tokens = Stopwatch(), {}
    for _ in range(rounds):
        for case in cases:
            with watch.measure(str(case)):
                tokens[case] = sum(map(len, draw(trainer, case[0], case[1]).token_ids))
    trainer.collector.engine.max_rows = 256  # type: ignore[attr-defined]
    return [
        {
            "rollouts drawn at once": case[0] * GROUP_SIZE,
            "max_rows": case[1],
            "completion tokens/s": tokens[case] / watch.median(str(case)),
        }
        for case in cases
    ]


def measure_policy(
    root: Path, steps: int, rounds: int, *, large: bool, compiled: bool
) -> dict[str, Any]:
    """Return all tables of one policy."""
    trainer = bench_trainer(root, 0)
    with closing(trainer.collector.grader):
        rates = [matmul_rate()]
        watch, rollouts = run_steps(trainer, steps)
        rate = statistics.mean([*rates, matmul_rate()])
        passes, ledger = Stopwatch(), trainer.state.ledger
        update_passes(trainer, rollouts, passes, share=True)
        parts = step_parts(watch, passes)
        completion = sum(int(r.completion_tokens_B().sum()) for r in rollouts)
        seconds = {
            "generate": watch.total("generate"),
            "update": watch.total("update"),
            "step": watch.total("step"),
        }
        flops = {name: ledger.executed[name] for name in ("generate", "update")}
        flops["step"] = sum(flops.values())
        sample = rollouts[: max(steps // 2, 1)]
        return {
            "rates": [{"phase": "large float32 matmul", "GFLOP/s": rate / 1e9}]
            + [
                {
                    "phase": name,
                    "ms a step": 1e3 * seconds[name] / steps,
                    "completion tokens/s": completion / seconds[name],
                    "executed GFLOPs a step": flops[name] / steps / 1e9,
                    "GFLOP/s": flops[name] / seconds[name] / 1e9,
                    "share of the matmul rate": flops[name] / seconds[name] / rate,
                }
                for name in seconds
            ],
            "parts": [
                {"part": k, "ms a step": 1e3 * v / steps, "share": v / seconds["step"]}
                for k, v in parts.items()
            ],
            "update": compare_batches(trainer, sample, rounds),
            "compiled": compare_compiled(trainer, sample, rounds) if compiled else "not measured",
            "generation": "not measured" if large else compare_generation(trainer, rounds),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps of the tiny policy")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often compared settings alternate"
    )
    parser.add_argument("--large", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in ("embedded", "large")[: 1 + options.large]:
        large, steps = name == "large", options.steps if name == "embedded" else 3
        with tempfile.TemporaryDirectory() as folder:
            layout = make_world(
                Path(folder) / "world", steps=steps + 1, group_size=GROUP_SIZE, large=large
            )
            found = measure_policy(
                layout.root,
                steps,
                1 if large else options.rounds,
                large=large,
                compiled=options.compile,
            )
        for title, rows in found.items():
            print(f"\n{name}: {title}\n\n{table(rows)}", flush=True)
    print(f"\npeak memory {peak_megabytes():.0f} MB; torch {torch.__version__}; one thread")


if __name__ == "__main__":
    main()
