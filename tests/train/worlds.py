"""A small world to train in: prompts, a profile, a plan and a policy under one data root, and its
parameters."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
import yaml

from tasks.common.artifacts import PLAN, PROMPTS, Layout
from tasks.models.policy import load_model
from tests.policies import place_policy

PARAMS: dict[str, Any] = {
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
        "num_replicas": 1,
        "max_retries": 2,
        "timeout_seconds": 60.0,
    },
    "store": {"location": None, "batch_rollouts": 2048, "logprobs": False},
    "verify": {
        "processes": 1,
        "seconds": 5.0,
        "memory_gb": 4.0,
        "max_failure_rate": 0.5,
        "verifiers": {},
    },
    "checkpoint": {"every_seconds": 0.0, "keep": 2},
    "tracking": {"uri": None, "experiment": "test", "log_weights": False},
    "evaluate": {"num_samples": 2, "pass_at": [1, 2], "num_bootstrap": 50},
    "train": {
        "batch": {"unit": "rollouts", "size": 12},
        "max_steps": None,
        "learning_rate": 1.0e-3,
        "warmup_steps": 0,
        "final_learning_rate_rate": 0.1,
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "dtype": "float32",
        "max_tokens_per_micro_batch": 64,
        "tokens_per_logprob_chunk": 50,
        "share_prompts": True,
        "advantage_over": "kept",
        "activation_checkpointing": False,
        "kl_coefficient": 0.0,
        "max_sampler_gap": 0.05,
        "max_nonfinite_steps": 3,
        "validation": {"num_samples": 1, "every_flops": 1.0e8},
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
    PLAN.write(layout.recipe("r") / "plan.parquet", PLAN.frame(plan))
    (root / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    return layout


def outputs(layout: Layout) -> dict[str, Any]:
    """What a finished run left, in a form that can be compared."""
    out = layout.train("r", 0)
    tables = {
        name: pl.read_parquet(out / f"{name}.parquet").to_dicts()
        for name in ("steps", "curve", "rollouts")
    }
    weights = (out / "policy" / "model.safetensors").read_bytes()
    return {**tables, "weights": weights, "flops": (out / "flops.json").read_text()}
