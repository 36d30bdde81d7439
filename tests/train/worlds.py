"""A small world to train in: prompts, a profile, a plan and a policy under one data root, and its
parameters."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import torch
import yaml

from tasks.common import params, stage
from tasks.common.artifacts import PLAN, PROMPTS, SAMPLES, Layout
from tasks.common.checksums import write_checked
from tasks.grading.background import BackgroundGrader
from tasks.models.policy import load_model, load_tokenizer, read_policy
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.learner.ranks import Ranks
from tasks.train.loop.buffer import Batch
from tasks.train.loop.loop import learn, train
from tasks.train.loop.save import write_results
from tasks.train.loop.trainer import Trainer
from tasks.train.run import build
from tasks.train.sampling.collector import MIN_JUDGED, RunContext
from tasks.train.settings import CheckpointSettings, Sections, TrainSettings
from tests.policies import place_policy

PARAMS: dict[str, Any] = {
    "experiment": {"recipes": ["r"], "seeds": [0], "budget": None},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8, "seed": 0},
    "engine": {
        "name": "hf",
        "device": "cpu",
        "dtype": "float32",
        "max_rows": 64,
        "memory_fraction": 0.3,
        "sleep": False,
        "threads": 1,
        "num_processes": 1,
        "urls": [],
        "cluster": "local",
        "num_replicas": 1,
        "weight_transfer": "file",
        "max_retries": 2,
        "timeout_seconds": 60.0,
    },
    "store": {"location": None, "batch_rollouts": 2048, "logprobs": False},
    "verify": {
        "processes": 1,
        "seconds": 5.0,
        "memory_gb": 4.0,
        "max_failure_rate": 0.5,
        "clock_factor": 20.0,
        "verifiers": {},
    },
    "checkpoint": {"every_seconds": 0.0, "keep": 2},
    "tracking": {"uri": None, "experiment": "test", "max_weights_gb": 0.0, "also": []},
    "evaluate": {"num_samples": 2, "pass_at": [1, 2], "num_bootstrap": 50},
    "train": {
        "batch": {"unit": "rollouts", "size": 12, "counts": "generated"},
        "updates": {"epochs": 1, "minibatches": 1},
        "max_staleness": 0,
        "in_flight_updates": False,
        "over_provision": 1.0,
        "max_steps": None,
        "learning_rate": 1.0e-3,
        "warmup_steps": 0,
        "final_learning_rate_fraction": 0.1,
        "decay_share": 1.0,
        "branches": [],
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
        "optimizer_bits": 32,
        "max_grad_norm": 1.0,
        "dtype": "float32",
        "lora": None,
        "advantage_over": "kept",
        "divisor": "generated",
        "correction": {"ratio_to": "old", "level": "token", "cap": 2.0, "mode": "truncate"},
        "kl_coefficient": 0.0,
        "validation": {"num_samples": 1, "every_share": 0.1},
        "control": {"method": "plan"},
        "generate": {"method": "batched"},
        "select": {"method": "all"},
        "replay": {"method": "none"},
        "advantage": {"method": "grpo"},
        "loss": {
            "method": "clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "ratio": "token",
            "normalize": "token",
        },
    },
    "learner": {
        "max_tokens_per_micro_batch": 64,
        "tokens_per_logprob_chunk": 50,
        "share_prompts": True,
        "max_shared_tokens": 4096,
        "activation_checkpointing": False,
        "shard": "none",
        "collective_timeout_seconds": 600,
    },
    "guards": {
        "max_sampler_gap": {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.005},
        "max_nonfinite_steps": 3,
    },
    "gates": {"min_solved_rate": 0.0, "max_truncated_rate": 1.0},
    "recipes": {"r": {"allocate": {"strategy": "uniform", "group_size": 4}, "train": {}}},
}


def make_world(root: Path, policy: Path, group_sizes: list[int], answer: str = "7") -> Layout:
    """Six prompts, and a plan that visits them in turn with `group_sizes`, in two phases."""
    layout = Layout(root)
    place_policy(
        policy, layout, load_model(policy, dtype=torch.float32, device=torch.device("cpu"))
    )
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
    """A profile of four samples a prompt without log-probabilities, two of them correct; the last
    prompt is never solved."""
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
    """The trainer of the world under `layout.root`; `changes` to the section `train`."""
    values = params.load(layout.root / "params.yaml")
    settings = params.parse({**values["train"], **changes}, TrainSettings, "train")
    sections = params.sections(values, Sections)
    run = stage.Stage.unrecorded("train", values, layout, recipe, seed)
    context = RunContext(read_policy(layout), settings, sections.sampling, ranks, seed)
    grader = BackgroundGrader(sections.verify, min_judged=MIN_JUDGED)
    return build(run, context, sections, grader)[0]


def sampled(trainer: Trainer) -> Batch | None:
    """The batch that a step takes; None at the end of the run."""
    trainer.buffer.reserve(trainer.buffer.num_sampled + 1)
    trainer.buffer.fill(trainer.learner.version)
    return next(iter(trainer.buffer.take(1)), None)


def run_in_process(
    layout: Layout,
    changes: dict[str, Any],
    prepare: Callable[[Trainer], object] = lambda trainer: None,
) -> Trainer:
    """The trainer at the end of its run."""
    trainer = make_trainer(layout, **changes)
    prepare(trainer)
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
    with closing(trainer.collector.grader):
        train(trainer, checkpoints, CheckpointSettings(1e9, 1), lambda *_: None)
    return trainer


class Killed(BaseException):
    """It stands for SIGKILL within a process."""


def run(
    layout: Layout,
    changes: dict[str, Any],
    every_seconds: float = 0.0,
    prepare: Callable[[Trainer], object] = lambda trainer: None,
    keep: int = 2,
) -> Trainer:
    """A run to its end, or from its last checkpoint on, with its results written."""
    trainer = make_trainer(layout, **changes)
    prepare(trainer)
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=keep)
    with closing(trainer.collector.grader):
        try:
            train(trainer, checkpoints, CheckpointSettings(every_seconds, keep), lambda *_: None)
        finally:
            checkpoints.wait()  # a process that is killed writes no more
    write_results(trainer, checkpoints, layout.train("r", 0))
    return trainer


@contextmanager
def dying_after(step: int) -> Iterator[Callable[[Trainer], None]]:
    """A run that is killed while it learns from that step, if it comes there."""

    def prepare(trainer: Trainer) -> None:
        record = trainer.record

        def dying(*arguments: Any) -> dict[str, Any]:
            if trainer.state.num_steps == step:
                raise Killed
            return record(*arguments)

        trainer.record = dying  # type: ignore[method-assign]

    yield prepare


def outputs(layout: Layout) -> dict[str, Any]:
    """What a finished run left, in a form that can be compared."""
    out = layout.train("r", 0)
    tables = {
        name: pl.read_parquet(out / f"{name}.parquet").to_dicts()
        for name in ("steps", "curve", "rollouts")
    }
    weights = (out / "policy" / "model.safetensors").read_bytes()
    return {**tables, "weights": weights, "flops": (out / "flops.json").read_text()}


def run_steps(trainer: Trainer, num: int) -> list[dict[str, Any]]:
    """Steps of the loop, without its files; their rows of STEPS."""
    trainer.score_replay()
    for _ in range(num):
        batch = sampled(trainer)
        assert batch is not None
        if learn(trainer, batch)["updated"]:
            trainer.sync_engine()
    return trainer.state.steps
