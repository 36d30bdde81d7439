"""`batched`: all rollouts in one call of the engine, which schedules its own slots."""

from tasks.engines.engine import Engine, Request, Samples
from tasks.train.slots import Generate, Requested


class Method(Generate):
    def __init__(self, num_prompts: int) -> None:
        """Ignore the number of prompts: the method has no state per prompt."""

    def generate(self, engine: Engine, request: Request, requested: Requested) -> Samples:
        return engine.generate(request, requested.on_ended)
