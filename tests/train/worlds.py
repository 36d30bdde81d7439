"""A small world to train in: prompts, a profile, a plan and a policy under one data root, and its
parameters."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import yaml

from tasks.common import params, stage
from tasks.common.accounting.spending import CellBudget
from tasks.common.artifacts import PLAN, PROMPTS, SAMPLES, Layout
from tasks.common.checksums import write_checked
from tasks.common.processes.pool import Pool
from tasks.grading.background import BackgroundGrader
from tasks.models.policy import load_tokenizer, read_policy
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import write_results
from tasks.train.learner.ranks import Ranks
from tasks.train.loop.loop import learn, train
from tasks.train.loop.queue import Batch
from tasks.train.loop.reporter import Log
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import MIN_JUDGED, RunContext
from tasks.train.settings import CheckpointSettings, Sections, TrainSettings
from tasks.train.trainers.own import build
from tests.engines.conftest import placed

PARAMS: dict[str, Any] = {
    "experiment": {"recipes": ["r"], "seeds": [0], "budget": None},
    "sampling": {"max_tokens": 8},
    "engine": {
        "name": "hf",
        "device": "cpu",
        "max_rows": 64,
        "memory_fraction": 0.3,
        "sleep": False,
        "max_retries": 2,
        "timeout_seconds": 60.0,
    },
    "store": {"location": None, "batch_rollouts": 2048, "logprobs": False},
    "verify": {"processes": 1, "max_failure_rate": 0.5},
    "checkpoint": {"every_seconds": 0.0},
    "tracking": {"uri": None, "experiment": "test", "max_weights_gb": 0.0, "also": []},
    "evaluate": {"num_samples": 2, "pass_at": [1, 2], "num_bootstrap": 50},
    "train": {
        "batch": {"unit": "rollouts", "size": 12, "counts": "generated"},
        "learning_rate": 1.0e-3,
        "decay_share": 1.0,  # these two have other defaults with a budget
        "branches": [],
        "validation": {"num_samples": 1, "every_share": 0.25},
    },
    "learner": {
        "max_tokens_per_micro_batch": 64,
        "tokens_per_logprob_chunk": 50,
        "collective_timeout_seconds": 600,
    },
    "guards": {"max_nonfinite_steps": 3},
    "gates": {"min_solved_rate": 0.0, "max_truncated_rate": 1.0},
    "recipes": {"r": {"allocate": {"strategy": "uniform", "group_size": 4}, "train": {}}},
}
"""Values that differ from the defaults, or that tests change."""


def make_world(root: Path, policy: Path, group_sizes: list[int], answer: str = "7") -> Layout:
    """Make six prompts, and a plan that visits them in turn with `group_sizes`, in two phases."""
    layout = Layout(root)
    placed(policy, root)
    rows = [
        {
            "prompt_id": f"p{n}",
            "prompt": f"{n}{'+1' * n} =",
            "answer": answer,
            "verifier": "numeric",
            "source": "t",
        }
        for n in range(6)
    ]
    for split in ("train", "validation", "test"):
        PROMPTS.write(layout.prompts(split), PROMPTS.frame([{**row, "level": ""} for row in rows]))
    half = len(group_sizes) // 2
    plan = [
        {
            "visit": i,
            "pass": 0,
            "phase": int(i >= half),
            "order": i % half,
            "prompt_id": f"p{i % 6}",
            "group_size": size,
        }
        for i, size in enumerate(group_sizes)
    ]
    for seed in (0, 1):
        PLAN.write(layout.plan("r", seed) / "plan.parquet", PLAN.frame(plan))
        SAMPLES.write(layout.plan("r", seed) / "samples.parquet", samples_of(policy, answer))
        write_checked(layout.plan("r", seed) / "budget.json", {"budget": None})
    write_params(layout)
    return layout


def write_params(layout: Layout, **changes: dict[str, Any]) -> None:
    """Write the world's parameters with `changes` of sections."""
    values = {**PARAMS, **{name: {**PARAMS[name], **changes[name]} for name in changes}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))


def samples_of(policy: Path, answer: str) -> pl.DataFrame:
    """Return a profile of four samples per prompt without log-probabilities, two of them correct;
    the last prompt is never solved."""
    tokenizer = load_tokenizer(policy)
    rows = [
        {
            "prompt_id": f"p{n}",
            "sample_index": k,
            "outcome": "correct" if k < 2 and n < 5 else "wrong",
            "reward": float(k < 2 and n < 5),
            "finish_reason": "stop",
            "token_ids": [
                *tokenizer(answer if k < 2 else "13").input_ids,
                tokenizer.eos_token_id,
            ],
            "logprobs": None,
        }
        for n in range(6)
        for k in range(4)
    ]
    return SAMPLES.frame(rows)


def make_trainer(
    layout: Layout,
    recipe: str = "r",
    seed: int = 0,
    ranks: Ranks = Ranks(0, 1),  # noqa: B008 - frozen
    **changes: Any,
) -> Trainer:
    """Return the trainer of the world, with `changes` of the section `train`."""
    values = params.load(layout.root / "params.yaml")
    settings = params.parse({**values["train"], **changes}, TrainSettings, "train")
    sections = params.sections(values, Sections)
    run = stage.Stage.unrecorded("train", values, layout, recipe, seed)
    context = RunContext(read_policy(layout), settings, sections.sampling, ranks, seed)
    grader = BackgroundGrader(sections.verify, min_judged=MIN_JUDGED)
    if sections.verify == params.sections(PARAMS, Sections).verify:
        grader.grader.names = {"numeric"}
        grader.grader.pool = shared_pool(os.getpid())
    return build(run, context, sections, grader)[0]


class SharedPool(Pool):
    """A pool that outlives its graders, since its start takes longer than most runs here."""

    lock = threading.Lock()

    def map(
        self, requests: Sequence[Any], on_done: Callable[[int], object] | None = None
    ) -> list[Any]:
        with self.lock:
            return super().map(requests, on_done)

    def close(self) -> None:
        if sys.exc_info()[0]:  # `map` failed, and a later call would receive these replies
            super().close()


@cache
def shared_pool(process: int) -> Pool:
    """Return the pool of a process: forks cannot use their parent's."""
    verify = params.sections(PARAMS, Sections).verify
    configuration = {"names": ["numeric"], "configured": {}, "memory": 2**32}
    limits = (verify.processes, verify.seconds, verify.clock_factor)
    pool = SharedPool("tasks.grading.verifier_worker", configuration, *limits)
    pool.handshake()  # a loader dies with the thread that started it
    return pool


def sampled(trainer: Trainer) -> Batch:
    trainer.queue.fill(trainer.learner.version)
    (batch,) = trainer.queue.take(1)
    return batch


def run_in_process(
    layout: Layout,
    changes: dict[str, Any],
    prepare: Callable[[Trainer], object] = lambda trainer: None,
) -> Trainer:
    """Return the trainer at the end of its run."""
    trainer = make_trainer(layout, **changes)
    prepare(trainer)
    train_to_end(trainer, layout)
    return trainer


def train_to_end(trainer: Trainer, layout: Layout, log: Log = lambda *_: None) -> dict[str, float]:
    """Train from the last checkpoint without further checkpoints; return the lost work."""
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
    with closing(trainer.collector.grader):
        return train(trainer, checkpoints, CheckpointSettings(1e9, 1), log)


def same_parameters(one: torch.nn.Module | None, other: torch.nn.Module | None) -> bool:
    assert one is not None
    assert other is not None
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


class Killed(BaseException):
    """A stand-in for SIGKILL within a process."""


def die_after(trainer: Trainer, step: int) -> None:
    """Kill the run when it records that step."""
    record = trainer.add_row

    def dying(*arguments: Any) -> dict[str, Any]:
        if trainer.state.num_steps == step:
            raise Killed
        return record(*arguments)

    trainer.add_row = dying  # type: ignore[method-assign]


def run(
    layout: Layout,
    changes: dict[str, Any],
    every_seconds: float = 0.0,
    prepare: Callable[[Trainer], object] = lambda trainer: None,
    keep: int = 2,
    dies_after: int | None = None,
) -> Trainer:
    """Run from the last checkpoint to the end, and write the results."""
    trainer = make_trainer(layout, **changes)
    if dies_after is not None:
        die_after(trainer, dies_after)
    prepare(trainer)
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=keep)
    with closing(trainer.collector.grader):
        try:
            train(trainer, checkpoints, CheckpointSettings(every_seconds, keep), lambda *_: None)
        finally:
            checkpoints.wait()  # a killed process writes nothing more
    write_results(trainer, checkpoints, layout.train("r", 0))
    return trainer


def run_with_kills(
    layout: Layout,
    changes: dict[str, Any],
    kills: Sequence[int],
    prepare: Callable[[Trainer], object] = lambda trainer: None,
) -> Trainer:
    """Kill a run in each of these steps that it reaches, then run it to its end."""
    num_kills = 0
    for step in kills:
        try:
            run(layout, changes, prepare=prepare, dies_after=step)
        except Killed:
            num_kills += 1
    assert num_kills >= len(kills) / 2
    return run(layout, changes, prepare=prepare)


def check_kills(
    root: Path,
    policy: Path,
    sizes: list[int],
    changes: dict[str, Any],
    kills: Sequence[int] = (3,),
    budget: CellBudget | None = None,
) -> Trainer:
    """Check that a run with kills in these steps ends like one without, with the same states of its
    methods. Return the trainer of the run without kills."""
    layouts = [make_world(root / side, policy, sizes) for side in ("whole", "killed")]
    for layout in layouts:
        if budget is not None:
            budget.write(layout.plan("r", 0) / "budget.json")
    whole, killed = run(layouts[0], changes), run_with_kills(layouts[1], changes, kills)
    first, second = map(outputs, layouts)
    assert first["rollouts"] == second["rollouts"]
    assert first == second
    found = killed.slots.states()
    for name, value in whole.slots.states().items():
        is_table = isinstance(value, pl.DataFrame)
        same = value.equals(found[name]) if is_table else np.array_equal(value, found[name])
        assert same, name
    return whole


def outputs(layout: Layout) -> dict[str, Any]:
    """Return the outputs of a finished run for comparisons."""
    out = layout.train("r", 0)
    tables = {
        name: pl.read_parquet(out / f"{name}.parquet").to_dicts()
        for name in ("steps", "curve", "rollouts")
    }
    weights = (out / "policy" / "model.safetensors").read_bytes()
    return {**tables, "weights": weights, "flops": (out / "flops.json").read_text()}


def run_steps(trainer: Trainer, num: int) -> list[dict[str, Any]]:
    """Run steps of the loop without its files; return their rows of STEPS."""
    trainer.score_replay()
    for _ in range(num):
        batch = sampled(trainer)
        if learn(trainer, batch)["updated"]:
            trainer.weights.load()
    return trainer.state.steps
