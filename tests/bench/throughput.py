"""Where Winnow's time goes: tokens per second against what this machine's float32 matmul allows,
and a step by parts.

    python -m tests.bench.throughput [--steps 40] [--no-large] [--no-compile] [--out FILE]

For the embedded tiny policy and for a 53-million-parameter Qwen3 with random weights (its rewards
are invented, so that every group has a gradient), on one thread. The matmul rate is measured around
each part; settings that are compared see the same rollouts and alternate, A B A B, medians. Shares
are executed FLOPs (the ledger's) over seconds over that rate: 100 % would be a program that does
nothing but its matrix products, all of them large. Seconds are CPU seconds of the thread that does
the work, which another job on the same cores disturbs least. Grading runs in a thread beside the
step, and the verifier in a process of its own, which is not measured.
"""

import argparse
import copy
import dataclasses
import json
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tasks.common.artifacts import Layout
from tasks.engines.engine import Request, Samples
from tasks.engines.hf import engine as hf
from tasks.models.policy import save_policy
from tasks.train.learner.correction import corrected_tokens
from tasks.train.learner.micro_batches import MicroBatch, micro_batches
from tasks.train.learner.update import Objective, batch_flops, token_logprobs
from tasks.train.loop.charge import charge
from tasks.train.loop.state import State
from tasks.train.loop.trainer import Trainer
from tasks.train.rollouts import Rollouts, StepTotals
from tasks.train.sampling.groups import rollouts_of
from tests.bench.clock import peak_megabytes
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import make_world
from tests.policies import place_policy

GROUP_SIZE = 8


class Stopwatch:
    """CPU seconds by part, one entry a measurement."""

    def __init__(self) -> None:
        self.entries: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Enter the CPU seconds of the block under `part`."""
        started = time.thread_time()
        yield
        self.entries[part].append(time.thread_time() - started)

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its calls measured."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measure(part):
                return function(*args, **kwargs)

        return measured

    def total(self, part: str) -> float:
        """All seconds of a part."""
        return sum(self.entries[part])

    def median(self, part: str) -> float:
        """The median entry of a part."""
        return statistics.median(self.entries[part])


def matmul_rate(size: int = 1024, repeats: int = 15) -> float:
    """FLOPs a second of a float32 product of two large square matrices: the median, one thread."""
    a, b, watch = torch.randn(size, size), torch.randn(size, size), Stopwatch()
    for _ in range(repeats):
        with watch.measure("matmul"):
            a @ b
    return 2.0 * size**3 / watch.median("matmul")


def make_large(layout: Layout) -> None:
    """A Qwen3 of 53 million parameters with random weights and the tiny policy's tokenizer, in the
    world's place."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(layout.policy)
    sizes = {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 10, "head_dim": 64}
    heads = {"num_attention_heads": 10, "num_key_value_heads": 10, "tie_word_embeddings": True}
    config = Qwen3Config(
        vocab_size=100,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        **sizes,
        **heads,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    (layout.policy / "generation_config.json").unlink()
    save_policy(model, tokenizer, layout.policy)
    place_policy(layout.policy, layout, model)


# --- a training step by parts


def run_steps(
    trainer: Trainer, steps: int, *, invent_rewards: bool
) -> tuple[Stopwatch, list[Rollouts]]:
    """`steps` training steps after a warm-up, their seconds by part, and their rollouts."""
    watch, rollouts = Stopwatch(), []
    step(trainer, Stopwatch(), invent_rewards)
    trainer.state = State(num_steps=trainer.state.num_steps)
    engine: Any = trainer.collector.engine
    grader: Any = trainer.collector.grader.grader
    optimizer: Any = trainer.learner.optimizer
    engine.generate = watch.wrap("generate", engine.generate)
    grader.grade = watch.wrap("grade", grader.grade)
    optimizer.step = watch.wrap("optimizer", optimizer.step)
    for _ in range(steps):
        rollouts.append(step(trainer, watch, invent_rewards))
    for owner, name in ((engine, "generate"), (grader, "grade"), (optimizer, "step")):
        delattr(owner, name)
    return watch, rollouts


def step(trainer: Trainer, watch: Stopwatch, invent_rewards: bool) -> Rollouts:
    """One training step, as `tasks.train.loop.loop.train` makes it."""
    with watch.measure("step"):
        trainer.buffer.reserve(trainer.buffer.num_sampled + 1)
        trainer.buffer.fill(trainer.learner.version)
        (batch,) = trainer.buffer.take(1)
        if invent_rewards:
            for group in batch.groups:
                for number, rollout in enumerate(group.rollouts):
                    rollout.reward = number % 2.0
            batch.fresh = rollouts_of(batch.groups)
        rollouts, rate = batch.fresh, trainer.learning_rate(batch.progress)
        rng = trainer.rng()
        rollouts = trainer.observe_policy(rollouts)
        estimate = trainer.estimate(rollouts, rng)
        with watch.measure("update"):
            update = trainer.update(rollouts, estimate, rate, rng)
            if update.norms:
                trainer.sync_engine()
        trainer.buffer.observe(batch.step + 1)
        trainer.slots.advantage.observe(rollouts)
        trainer.slots.replay.add(batch.fresh)
        charge(trainer, batch, rollouts, estimate, update)
        trainer.record(batch, rollouts, estimate, update, rate)
    return rollouts


def step_parts(watch: Stopwatch, passes: Stopwatch) -> dict[str, float]:
    """Seconds of all steps by part. Forward and backward are measured apart, on the same
    rollouts."""
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


# --- the update alone


def batches_of(
    trainer: Trainer, rollouts: Rollouts, objective: Objective, limit: int | None
) -> list[MicroBatch]:
    """The micro-batches of the groups that have a gradient, as the trainer makes them."""
    advantages_B = trainer.slots.advantage(rollouts)
    rows, limit = (
        np.flatnonzero(advantages_B),
        limit or trainer.learner.memory.max_tokens_per_micro_batch,
    )
    if not len(rows):
        return []
    return micro_batches(
        rollouts, rows, limit, trainer.learner.model.device, by_group=objective.share_prompts
    )


def update_passes(
    trainer: Trainer,
    steps: list[Rollouts],
    watch: Stopwatch,
    *,
    share: bool,
    limit: int | None = None,
    model: Any = None,
) -> dict[str, float]:
    """Forward and backward over the steps' rollouts, no optimizer; FLOPs, completion tokens and
    padding share."""
    model = trainer.learner.model if model is None else model
    objective = dataclasses.replace(
        trainer.learner.objective(trainer.slots.loss), share_prompts=share
    )
    sums: dict[str, float] = defaultdict(float)
    for rollouts in steps:
        advantages_B = trainer.slots.advantage(rollouts)
        tokens = int(rollouts.completion_tokens_B().sum())
        totals = StepTotals(tokens, len(rollouts.group_B), trainer.run.sampling.max_tokens)
        for batch in batches_of(trainer, rollouts, objective, limit):
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
            computed, real = sizes(batch, share)
            sums["computed"], sums["real"] = sums["computed"] + computed, sums["real"] + real
            sums["tokens"] += len(batch.targets_N)
            sums["flops"] += 3.0 * sum(batch_flops(trainer.run.policy.architecture, batch, share))
        model.zero_grad(set_to_none=True)
    return {**sums, "padding": 1.0 - sums["real"] / sums["computed"]}


def sizes(batch: MicroBatch, share: bool) -> tuple[int, int]:
    """Positions that the forward computes, and those among them that are not padding."""
    fed = sum(len(completion) - 1 for completion in batch.completions)
    if share:
        computed = len(batch.shared[0].ids)
        return computed, fed + sum(map(len, batch.prompts))
    return batch.whole.input_ids.numel(), fed + sum(
        len(batch.prompts[owner]) for owner in batch.owner_B
    )


def compare_batches(trainer: Trainer, steps: list[Rollouts], rounds: int) -> list[dict[str, Any]]:
    """The update with each prompt read once, and with every rollout read whole; in fewer or more
    micro-batches."""
    watch, found = Stopwatch(), {}
    limits = [trainer.learner.memory.max_tokens_per_micro_batch, 2048, 1024, 512]
    for _ in range(rounds):
        for case in [(share, limit) for limit in limits for share in (True, False)]:
            with watch.measure(str(case)):
                found[case] = update_passes(
                    trainer, steps, Stopwatch(), share=case[0], limit=case[1]
                )
    return [
        row(
            f"share_prompts {str(c[0]).lower()}, max_tokens {c[1]}",
            watch.median(str(c)),
            found[c],
            len(steps),
        )
        for c in found
    ]


def compare_compiled(
    trainer: Trainer, steps: list[Rollouts], rounds: int
) -> list[dict[str, Any]] | str:
    """The update eager and by torch.compile (dynamic shapes); a sentence where it cannot
    compile."""
    compiled, watch, found = copy.deepcopy(trainer.learner.model), Stopwatch(), {}
    compiled.base_model.compile(dynamic=True)
    try:
        started = time.perf_counter()
        for _ in range(2):  # shapes that were not foreseen compile again
            update_passes(trainer, steps, Stopwatch(), share=True, model=compiled)
        first = time.perf_counter() - started
        for _ in range(rounds):
            for name, model in (("eager", trainer.learner.model), ("torch.compile", compiled)):
                with watch.measure(name):
                    found[name] = update_passes(
                        trainer, steps, Stopwatch(), share=True, model=model
                    )
    except Exception as error:  # whatever the compiler's tool chain lacks here is the result
        return (
            f"torch.compile does not work here: {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0][:200]}"
        )
    rows = [row(name, watch.median(name), found[name], len(steps)) for name in found]
    rows[1]["compile, s"] = first - 2 * watch.median("torch.compile")
    return rows


def row(name: str, seconds: float, sums: dict[str, float], steps: int) -> dict[str, Any]:
    """A line of a table about the update."""
    rates = {"ms a step": 1e3 * seconds / steps, "completion tokens/s": sums["tokens"] / seconds}
    return {
        "update": name,
        **rates,
        "GFLOPs a step": sums["flops"] / steps / 1e9,
        "padding": sums["padding"],
    }


# --- generation alone


def draw(trainer: Trainer, num_prompts: int, max_rows: int) -> Samples:
    """A group of completions for each of so many prompts, `max_rows` in flight at most."""
    engine = trainer.collector.engine
    assert isinstance(engine, hf.HfEngine)
    engine.max_rows = max_rows
    prompts, count = trainer.prompts.token_ids(np.arange(num_prompts)), num_prompts * GROUP_SIZE
    return engine.generate(
        Request(prompts, [GROUP_SIZE] * num_prompts, range(count), trainer.run.sampling)
    )


def compare_generation(trainer: Trainer, rounds: int) -> list[dict[str, Any]]:
    """Tokens per second by rollouts drawn at once, by rows in flight, and by how many slots must be
    free to refill."""
    default = hf.REFILL_RATE
    cases = [(prompts, 256, default) for prompts in (4, 8, 16, 32, 64)]
    cases += [(32, rows, default) for rows in (32, 64, 128)]
    cases += [(256, 256, rate) for rate in (0.05, default, 0.5, 0.75, 1.0)]
    watch, tokens = Stopwatch(), {}
    for _ in range(rounds):
        for case in cases:
            hf.REFILL_RATE = case[2]
            with watch.measure(str(case)):
                tokens[case] = sum(map(len, draw(trainer, case[0], case[1]).token_ids))
    hf.REFILL_RATE, trainer.collector.engine.max_rows = default, 256  # type: ignore[attr-defined]
    names = ("rollouts drawn at once", "max_rows", "refill at free share")
    return [
        {
            **dict(zip(names, (case[0] * GROUP_SIZE, *case[1:]), strict=True)),
            "completion tokens/s": tokens[case] / watch.median(str(case)),
        }
        for case in cases
    ]


# --- the whole report


def measure_policy(
    root: Path, steps: int, rounds: int, *, large: bool, compiled: bool
) -> dict[str, Any]:
    """All tables of one policy."""
    trainer = bench_trainer(root, 0)
    with closing(trainer.collector.grader):
        rates = [matmul_rate()]
        watch, rollouts = run_steps(trainer, steps, invent_rewards=large)
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


def table(rows: list[dict[str, Any]] | str) -> str:
    """A markdown table of rows that have the first row's columns or more."""
    if isinstance(rows, str):
        return rows
    columns = list(dict.fromkeys(key for line in rows for key in line))
    lines = [columns, ["---"] * len(columns)] + [
        [cell(c, line.get(c)) for c in columns] for line in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(column: str, value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, float) and ("share" in column or column == "padding"):
        return f"{value:.1%}"
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)


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
    parser.add_argument("--out", type=Path, help="also write everything measured, as JSON")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in ("tiny", "53M")[: 1 + options.large]:
        large, steps = name != "tiny", options.steps if name == "tiny" else 3
        with tempfile.TemporaryDirectory() as folder:
            layout = make_world(Path(folder) / "world", steps=steps + 1, group_size=GROUP_SIZE)
            if large:
                make_large(layout)
            found[name] = measure_policy(
                layout.root,
                steps,
                1 if large else options.rounds,
                large=large,
                compiled=options.compile,
            )
        for title, rows in found[name].items():
            print(f"\n{name}: {title}\n\n{table(rows)}", flush=True)
    print(f"\npeak memory {peak_megabytes():.0f} MB; torch {torch.__version__}; one thread")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
