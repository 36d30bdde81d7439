"""The engine `hf`, which also writes down what it was handed and what it has finished: a kill
cannot take that back."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tasks.engines.engine import Request, Samples
from tasks.engines.hf import engine as hf


class CountingEngine:
    """Lines of a file, each written at once: `handed N`, then `done n` as rollouts end."""

    def __init__(self, inner: Any, path: str) -> None:
        self.inner, self.name, self.version, self.prefix_block = (
            inner,
            inner.name,
            inner.version,
            inner.prefix_block,
        )
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def generate(
        self, request: Request, on_finished: Callable[[int], object] | None = None
    ) -> Samples:
        def done(number: int) -> None:
            os.write(self.file, b"done %d\n" % number)
            if on_finished:
                on_finished(number)

        os.write(self.file, b"handed %d\n" % len(request.seeds))
        return self.inner.generate(request, done)  # type: ignore[no-any-return]

    def sleep(self) -> None:
        self.inner.sleep()

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.inner.set_weights(weights)


def load(settings: Any, policy: Any, model: Any) -> CountingEngine:
    return CountingEngine(hf.load(settings, policy, model), os.environ["WINNOW_COUNTS"])
