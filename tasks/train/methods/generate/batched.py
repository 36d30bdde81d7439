"""`batched`: all rollouts in one call of the engine, which keeps its own slots full."""

from tasks.engines.engine import Engine, Request, Samples
from tasks.train.rollouts import Draw, Rollouts, State


def start(num_prompts: int) -> State:
    """No state."""
    return {}


def generate(state: State, engine: Engine, draw: Draw) -> Samples:
    """`draw.counts[q]` completions of `draw.prompts[q]`, each with its own seed."""
    return engine.generate(Request(draw.prompts, draw.counts, draw.seeds, draw.sampling))


def observe(state: State, rollouts: Rollouts) -> None:
    """Nothing is learned."""
