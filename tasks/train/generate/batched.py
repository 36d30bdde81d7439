"""`batched`: all rollouts in one call of the engine, which keeps its own slots full."""

from tasks.sampling.engine import Engine, Samples
from tasks.train.batch import Draw


def generate(engine: Engine, draw: Draw) -> Samples:
    """`draw.counts[q]` completions of `draw.prompts[q]`, each with its own seed."""
    return engine.generate(draw.prompts, draw.counts, draw.sampling, draw.seeds)
