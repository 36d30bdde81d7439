"""Measure the peak memory of the update of one long rollout, by its length.

    python -m tests.bench.sequence_length [--lengths 4096 8192 16384 32768] [--out FILE]

The policy is a Llama of 4 layers with hidden size 256 and random weights, in float32, with and
without recomputed activations. Each cell is a process, and the memory for a rollout of 64 tokens is
subtracted. The unit of the last column is one hidden state of the policy, for each token."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.models.policy import architecture_of, describe, load_model
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import (
    Objective,
    accumulate_gradients,
    enable_activation_checkpointing,
)
from tasks.train.methods.loss import clip
from tasks.train.rollouts import StepTotals, make_rollouts
from tasks.train.settings import Correction, LearnerSettings
from tests.bench.peak import peak_of
from tests.bench.tables import table

HIDDEN, LAYERS, PROMPT = 256, 4, 32


def update(length: int, *, is_checkpointing: bool) -> None:
    """Make the gradient of one rollout of so many tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * length,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = load_model(Path(folder), dtype=torch.float32, device=torch.device("cpu"))
    if is_checkpointing:
        enable_activation_checkpointing(model)
    model.train(is_checkpointing)
    memory, num = LearnerSettings(), length - PROMPT
    ids = torch.randint(512, (length,)).tolist()
    rollouts = make_rollouts(
        np.array([0]),
        [ids[:PROMPT]],
        np.array([0]),
        token_ids=[ids[PROMPT:]],
        logprobs=[[-6.0] * num],
        versions=[[0] * num],
    ).estimated(np.array([True]), np.ones(num))
    batches = micro_batches(
        rollouts,
        np.array([0]),
        memory.max_tokens_per_micro_batch,
        model.device,
        by_group=True,
        max_shared_tokens=memory.max_shared_tokens,
    )
    objective = Objective(
        clip.Method(clip.EXAMPLE),
        Correction(),
        temperature=1.0,
        reference=None,
        kl_coefficient=0.0,
        share_prompts=True,
        tokens_per_chunk=memory.tokens_per_logprob_chunk,
    )
    architecture = architecture_of(describe(model))
    accumulate_gradients(model, batches, rollouts, objective, StepTotals(num, 1, num), architecture)


def measure(length: int, *, is_checkpointing: bool) -> dict[str, Any]:
    """Return the row of a length."""
    command = ["-m", "tests.bench.sequence_length", *["--recompute"] * is_checkpointing, "--one"]
    found = peak_of([*command, str(length)]) - peak_of([*command, "64"])
    states = found.megabytes * 2**20 / 4 / HIDDEN / length
    return {
        "tokens": f"{length:,}",
        "activations": "recomputed" if is_checkpointing else "kept",
        "peak MB": round(found.megabytes),
        "hidden states a token": round(states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        update(arguments.one, is_checkpointing=arguments.recompute)
        return
    rows = [
        measure(length, is_checkpointing=is_checkpointing)
        for is_checkpointing in (False, True)
        for length in arguments.lengths
    ]
    print(words := table(rows))
    if arguments.out:
        arguments.out.write_text(words + "\n")


if __name__ == "__main__":
    main()
