"""The small world of the benchmarks: a data root with a policy, prompts and one recipe's plan.

The project's own stages make it from `params.yaml`, so it measures what a user runs. The learning
rate is constant (with a schedule, policies at different numbers of steps are not comparable), and
tracking, checkpoints and validation are off.

The policy is the embedded one, or a large one with random weights: 24 million parameters, with
prompts of 109 tokens and completions of about 96, and rewards that depend on the last character.
There the matrix products take most of the time, as in users' trainings. Or policy, prompts and
dtypes are those of a data root, such as of the example with a language model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tasks.common.artifacts import PLAN, PROMPTS, SAMPLES, Layout
from tasks.common.checksums import write_checked
from tasks.models.policy import save_policy
from tasks.policy.source import EMBEDDED
from tests.files import PROJECT as PROJECT
from tests.parameters import every_value
from tests.policies import place_policy

RECIPE = "bench"  # groups of 8, as grpo
RECIPES = {"grpo": RECIPE, "winnow": "winnow"}  # of the sides of a comparison
NEVER = 1e30


def make_world(
    root: Path,
    *,
    steps: int,
    group_size: int = 8,
    rollouts: int = 32,
    seeds: int = 1,
    large: bool = False,
    data: Path | None = None,
) -> Layout:
    """Make prompts, policy, parameters, a plan of `steps` steps (the same for all seeds), and its
    prompts in order as JSON lines: as chat messages if the policy has a chat template."""
    layout, values = Layout(root), parameters(rollouts, large, data)
    root.mkdir(parents=True, exist_ok=True)
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    if data:
        shutil.copytree(data / "prompts", root / "prompts")
        layout.policy.symlink_to((data / "policy").resolve())
        shutil.copy(Layout(data).policy_card, layout.policy_card)
    else:
        place_embedded(layout)
        if large:
            make_large(layout)
        paths = ["--params", str(root / "params.yaml"), "--data", str(root)]
        command = [sys.executable, "-m", "tasks.ingest", *paths]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, cwd=PROJECT)
    chosen = write_plan(layout, RECIPE, steps * rollouts // group_size, group_size, seeds)
    rows = [{k: row[k] for k in ("prompt", "answer", "verifier")} for row in chosen]
    if AutoTokenizer.from_pretrained(layout.policy).chat_template:
        rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (root / "order.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    own = values["recipes"]["winnow"]["allocate"]["group_size"]
    write_plan(layout, "winnow", steps * rollouts // own, own, seeds)
    return layout


def place_embedded(layout: Layout) -> None:
    """Copy the embedded policy to a data root."""
    shutil.copytree(EMBEDDED.policy, layout.policy)
    shutil.copy(EMBEDDED.policy_card, layout.policy_card)


def make_large(layout: Layout) -> None:
    """Replace the policy by the large one, with the same tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(layout.policy)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
    tokens = {"vocab_size": 100, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen3Config(max_position_embeddings=512, **sizes, **heads, **tokens)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    (layout.policy / "generation_config.json").unlink()
    save_policy(model, tokenizer, layout.policy)
    place_policy(layout.policy, layout, model)


def parameters(rollouts: int, large: bool = False, data: Path | None = None) -> dict[str, Any]:
    """Return params.yaml, the project's or that of a data root, without features that disturb a
    measurement, with fixed choices for the machine."""
    values: dict[str, Any] = every_value((data or PROJECT) / "params.yaml")
    values["engine"] |= {"name": "hf", "device": "cpu", "threads": 1}
    values["checkpoint"] |= {"every_seconds": NEVER}
    values["ingest"]["splits"] = {"train": 1024, "validation": 256, "test": 16}
    values["train"] |= {
        "batch": {"unit": "rollouts", "size": rollouts, "counts": "generated"},
        "updates": {"epochs": 1, "minibatches": 1},
        "final_learning_rate_fraction": 1.0,
        "decay_share": 1.0,
        "branches": [],
        "warmup_steps": 0,
        "kl_coefficient": 0.0,
        "validation": {"num_samples": 1, "every_share": 1.0},
    }
    if large:
        values["sampling"] |= {"max_tokens": 320}  # of random completions 4 % are longer
        values["train"] |= {"learning_rate": 1e-6}  # so that their lengths do not change
        (task,) = values["ingest"]["sources"][0]["settings"]["tasks"]
        task["config"] = {"min_terms": 27, "max_terms": 27, "min_digits": 1, "max_digits": 1}
        task["verifier"] = "coin"
        coin = {"method": "regex", "pattern": "[0-9a-zA-L]$", "match": "search"}
        values["verify"] |= {"verifiers": {"coin": coin}}
    plain = {"allocate": {"strategy": "uniform", "group_size": 8}, "train": {}}
    return {**values, "recipes": {RECIPE: plain, "winnow": values["recipes"]["winnow"]}}


def write_plan(
    layout: Layout, recipe: str, visits: int, group_size: int, seeds: int
) -> list[dict[str, Any]]:
    """Plan `visits` groups over the shuffled training prompts, repeated if they run out; return the
    prompts in order."""
    prompts = PROMPTS.read(layout.prompts("train")).to_dicts()
    order = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))]
    chosen = [order[i % len(order)] for i in range(visits)]
    rows = [
        {
            "visit": i,
            "pass": 0,
            "phase": 0,
            "order": i,
            "prompt_id": row["prompt_id"],
            "group_size": group_size,
        }
        for i, row in enumerate(chosen)
    ]
    for seed in range(seeds):
        PLAN.write(layout.plan(recipe, seed) / "plan.parquet", PLAN.frame(rows))
        SAMPLES.write(layout.plan(recipe, seed) / "samples.parquet", SAMPLES.frame([]))
        write_checked(layout.plan(recipe, seed) / "budget.json", {"budget": None})
    return chosen
