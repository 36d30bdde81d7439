"""Settings that sections of several stages share."""

from typing import Literal

from tasks.common.params import at_least, settings


@settings
class Lora:
    """Adapters that are trained in place of a whole policy: `train.lora`, or `lora` of
    `policy.supervised.training`."""

    rank: int  # of the adapters
    alpha: float  # their effect is scaled by alpha / rank
    modules: list[str] = ["all-linear"]  # last parts of names; all-linear: all but the output head
    base_bits: Literal[32, 4] = 32  # of the frozen weights; 4: by torchao

    def __post_init__(self) -> None:
        at_least(1, lora__rank=self.rank)
