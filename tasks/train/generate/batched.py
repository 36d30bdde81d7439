"""`batched`: all rollouts of the request in one call of the engine, which keeps its own slots full."""

from collections.abc import Sequence

import numpy as np

from tasks.sampling.engine import Engine, Samples, Sampling
from tasks.train.batch import Request


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], request: Request, sampling: Sampling, rng: np.random.Generator
) -> Samples:
    """`request.counts[q]` completions of `prompts[q]`, each with a seed of its own from `rng`."""
    counts = request.counts.tolist()
    seeds = rng.integers(0, 2**63 - 1, size=sum(counts)).tolist()
    return engine.generate(prompts, counts, sampling, seeds)
