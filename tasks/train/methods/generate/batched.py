"""`batched`: all rollouts in one call of the engine, which keeps its own slots full."""

from tasks.engines.engine import Engine, Request, Samples
from tasks.train.slots import Asked, Generate


class Method(Generate):
    def __init__(self, num_prompts: int) -> None:
        """Nothing is remembered of prompts."""

    def generate(self, engine: Engine, request: Request, asked: Asked) -> Samples:
        return engine.generate(request, asked.on_ended)
