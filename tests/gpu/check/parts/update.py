"""The update by shape, length, `share_prompts` and `compile`: tokens per second, the share of the
machine's matrix product rate (MFU), micro-batches, waits of the host for the device, and peak
memory beside the estimate of `memory_of`."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common import params
from tasks.engines.engine import Samples
from tasks.engines.settings import Sampling
from tasks.models.lora import add_adapters
from tasks.models.policy import Policy, architecture_of, describe
from tasks.models.settings import Lora
from tasks.train.data.rollouts import Rollouts
from tasks.train.learner.learner import Learner, memory_of
from tasks.train.learner.ranks import Ranks
from tasks.train.learner.update import UpdateStats
from tasks.train.methods.loss import clip
from tasks.train.settings import LearnerSettings, TrainSettings
from tests.gpu.check.shapes import Sizes, make_model, matmul_rate, seconds_of
from tests.parameters import every_value
from tests.train.steps import estimated, graded
from tests.waits import num_waits

PROMPT_TOKENS = 128
NUM_TOKENS = 32_768  # of a step's completions
MEAN_RATE = 15 / 16 / np.log(16.0)  # of the longest completion


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    size = 128 if sizes.is_small else 8192
    rate = matmul_rate(torch.bfloat16, sizes.device, size)
    for shape in sizes.shapes:
        for length in sizes.lengths:
            # a CPU may have no compiler
            cases = [(True, False)] + [(True, True)] * (not sizes.is_small)
            for share, is_compiled in cases + [(False, False)] * (length == sizes.lengths[0]):
                changes = {"share_prompts": share, "compile": is_compiled}
                row = {"model": shape, "longest completion": length, **changes}
                yield row | measure(shape, length, sizes, rate, **changes)


def measure(shape: str, length: int, sizes: Sizes, rate: float, **changes: Any) -> dict[str, Any]:
    """Measure the median update of three steps of groups of eight, after a warm-up. A step has
    other lengths than those before."""
    device = sizes.device
    try:
        changes["activation_checkpointing"] = shape == "1.5B"  # 16,384 tokens need it
        learner = make_learner(shape, sizes, **changes)
        size = 192 if sizes.is_small else NUM_TOKENS
        first, *steps = (
            rollouts_of(learner, length, size, seed) for seed in range(sizes.repeats + 1)
        )
        free(sizes)
        before = allocated(sizes)
        update(learner, first)
        seconds, rollouts = sorted(
            ((seconds_of(lambda s=step: update(learner, s), device), step) for step in steps),
            key=lambda pair: pair[0],
        )[len(steps) // 2]
        gradients: list[UpdateStats] = []
        waits = num_waits(lambda: gradients.append(gradient(learner, rollouts)), device)
        flops = gradients[0].flops
        return {
            "tokens/s": int(rollouts.completion_tokens_B().sum()) / seconds,
            "MFU": flops / seconds / rate,
            "micro-batches": len(learner.micro_batches(rollouts, np.arange(len(rollouts.group_B)))),
            "waits": waits,
            **peak(learner, before, sizes),
        }
    except torch.OutOfMemoryError as error:
        return {"tokens/s": None, "MFU": None, "out of memory": str(error).splitlines()[0]}
    finally:
        free(sizes)


def make_learner(
    shape: str, sizes: Sizes, lora: Lora | None = None, dtype: str = "bfloat16", **changes: Any
) -> Learner:
    """Return a learner of random weights with the project's own parameters."""
    values = every_value()
    settings = params.parse({**values["train"], "dtype": dtype}, TrainSettings, "train")
    settings = dataclasses.replace(settings, lora=lora)
    memory = params.parse(values["learner"], LearnerSettings, "learner")
    limit = 256 if sizes.is_small else 8_192
    memory = dataclasses.replace(memory, max_tokens_per_micro_batch=limit, **changes)
    model = make_model(shape, torch.float32, sizes.device)
    if lora is not None:
        add_adapters(model, lora, seed=0)
    architecture = architecture_of(describe(model))
    policy = Policy(Path(), "random", architecture, 32_768, model.config.vocab_size, False)
    sampling = Sampling(1.0, 1.0, 0, max(sizes.lengths), 0)
    return Learner(
        policy=policy,
        model=model,
        settings=settings,
        memory=memory,
        sampling=sampling,
        ranks=Ranks(0, 1),
        device=sizes.device,
    )


def rollouts_of(learner: Learner, length: int, num_tokens: int, seed: int = 0) -> Rollouts:
    """Return groups of eight random completions of a sixteenth of this length to this length, on a
    logarithmic scale, half of them correct. Their log-probabilities are those of a flat
    distribution, which random weights nearly have."""
    rng, vocabulary = np.random.default_rng(seed), learner.model.config.vocab_size
    num_groups = max(round(num_tokens / (8 * MEAN_RATE * length)), 1)
    prompts = rng.integers(2, vocabulary, (num_groups, PROMPT_TOKENS)).tolist()
    lengths = np.ceil(length * 16.0 ** -rng.random(8 * num_groups)).astype(np.int64)
    tokens = [rng.integers(2, vocabulary, size).tolist() for size in lengths]
    flat = [[-float(np.log(vocabulary))] * size for size in lengths]
    samples = Samples(tokens, flat, ["length"] * len(tokens))
    group_B = np.repeat(np.arange(num_groups), 8)
    rewards = np.arange(len(tokens)) % 2.0
    made = graded(prompts, group_B, samples, rewards)
    return estimated(made, np.where(rewards > 0, 1.0, -1.0))


def gradient(learner: Learner, rollouts: Rollouts) -> UpdateStats:
    return learner.compute_gradient(rollouts, clip.Method(clip.Settings()))


def update(learner: Learner, rollouts: Rollouts, rate: float = 1e-6) -> None:
    gradient(learner, rollouts)
    learner.step(rate)


def peak(learner: Learner, before: float, sizes: Sizes) -> dict[str, Any]:
    """Return the peak memory of training besides its weights, in GiB, and its estimate without
    activations."""
    if sizes.device.type != "cuda":
        return {}
    foreseen = memory_of(learner.model, learner.settings, learner.memory)
    measured = torch.cuda.max_memory_allocated() - before
    return {
        "peak beside the weights, GiB": measured / 2**30,
        "foreseen without activations, GiB": (foreseen.lasting + foreseen.update) / 2**30,
    }


def allocated(sizes: Sizes) -> float:
    if sizes.device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def free(sizes: Sizes) -> None:
    gc.collect()
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
