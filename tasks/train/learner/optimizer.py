"""AdamW, with its two moments of every weight in 32 bits by torch or in 8 by torchao (Dettmers et
al., arXiv 2110.02861), an extra.

A moment in 8 bits is a code for each weight, a float32 scale for every 256 of them, and the table
of 256 values that the codes stand for. Tensors of fewer than 4,096 weights, or not of a multiple of
256, keep their moments in float32. torchao compiles the step by torch.compile: on a GPU only, as it
takes half a minute on a CPU, and a C++ compiler."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tasks.train.settings import TrainSettings

FIRST, SECOND = "exp_avg", "exp_avg_sq"  # the moments' names in the optimizer's state
PARTS = ("codes", "scale", "qmap")  # the tensors of a moment in 8 bits


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], settings: TrainSettings
) -> torch.optim.Optimizer:
    """The optimizer of these parameters, as the section `train` has it."""
    adamw: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True}
    if settings.optimizer_bits == 8:
        from torchao.optim import AdamW8bit

        adamw, options = AdamW8bit, {}
    return adamw(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.betas[0], settings.betas[1]),
        weight_decay=settings.weight_decay,
        **options,
    )


def step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Move the parameters along their gradients, at this learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's, which its compiled step reads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    on_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
    with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
        optimizer.step()


def plain_parts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of the optimizer's state as plain tensors by name: itself, or the parts of a moment
    in 8 bits."""
    if not hasattr(value, "codes"):
        return {name: value}
    return {f"{name}/{part}": getattr(value, part) for part in PARTS}


def from_parts(name: str, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The moment in 8 bits that has these parts; the inverse of `plain_parts`."""
    from torchao.optim.subclass_8bit import OptimState8bit

    moment: torch.Tensor = OptimState8bit(*parts, signed=name == FIRST, dtype=dtype)
    return moment
