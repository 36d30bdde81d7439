"""AdamW, with its two moments per weight in 32 bits (torch) or in 8 bits (torchao, an optional
package; Dettmers et al., arXiv 2110.02861).

A moment in 8 bits is a code per weight, a float32 scale per 256 weights, and a table of the 256
values of the codes. Tensors with fewer than 4,096 weights, or whose size is not a multiple of 256,
keep their moments in float32. torchao compiles the step with torch.compile, which needs a C++
compiler. It does so only on a GPU, since it takes half a minute on a CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tasks.train.settings import TrainSettings

FIRST, SECOND = "exp_avg", "exp_avg_sq"  # the moments' names in the optimizer's state
PARTS = ("codes", "scale", "qmap")  # the tensors of a moment in 8 bits


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], settings: TrainSettings
) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters, as set in the section `train`."""
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
    """Take an optimizer step with the learning rate `rate`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # of torchao: its compiled step reads it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    on_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
    with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
        optimizer.step()


def plain_parts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor of the optimizer's state as plain tensors by name: itself, or the parts of a
    moment in 8 bits."""
    if not hasattr(value, "codes"):
        return {name: value}
    return {f"{name}/{part}": getattr(value, part) for part in PARTS}


def from_parts(name: str, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the moment in 8 bits with these parts; the inverse of `plain_parts`."""
    from torchao.optim.subclass_8bit import OptimState8bit

    moment: torch.Tensor = OptimState8bit(*parts, signed=name == FIRST, dtype=dtype)
    return moment
