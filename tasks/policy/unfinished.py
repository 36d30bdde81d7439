"""The checkpoint of an unfinished policy: a kill loses only the work after the last save, and the
final policy is the same as without an interruption.

It is one file, written whole or not at all: the weights, AdamW's state and, in the header, the
progress, the digest of the settings, and the checksum of the tensors. A file that is damaged, or of
other settings, is ignored. The format is safetensors, which cannot execute code."""

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tasks.common.files import digest, replace_file

logger = logging.getLogger(__name__)
NUMBERS = ("num_chunks", "start", "num_tokens")


class Unfinished:
    """The file at `path`, for a training with `settings`, written about every `every_seconds`."""

    def __init__(self, path: Path, settings: Mapping[str, Any], every_seconds: float) -> None:
        self.path, self.key, self.every_seconds = path, digest(dict(settings)), every_seconds
        self.saved = time.monotonic()

    def save_now_and_then(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        num_chunks: int,
        start: int,
        num_tokens: int,
    ) -> None:
        """Save the state after `num_chunks` whole chunks, which end at `start` tokens, and
        `num_tokens` in all, unless the last save was recent."""
        if time.monotonic() - self.saved < self.every_seconds:
            return
        tensors = {name: tensor.cpu() for name, tensor in tensors_of(model, optimizer).items()}
        header = {
            "key": self.key,
            "num_chunks": str(num_chunks),
            "start": str(start),
            "num_tokens": str(num_tokens),
            "sha256": checksum(tensors),
        }
        content = save(tensors, header)
        replace_file(self.path, lambda file: file.write(content))
        self.saved = time.monotonic()

    def load(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, int, int]:
        """Restore the saved state, and return its numbers, in the order of `save_now_and_then`.
        Return zeros if there is no usable file."""
        try:
            with safe_open(self.path, "pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return 0, 0, 0
        except SafetensorError as error:
            logger.warning("%s is damaged, starting over: %s", self.path, error)
            return 0, 0, 0
        if header.get("key") != self.key:
            logger.info("starting over: %s is of other settings", self.path)
            return 0, 0, 0
        if header.get("sha256") != checksum(tensors):
            logger.warning("%s is damaged, starting over", self.path)
            return 0, 0, 0
        restore(model, optimizer, tensors)
        logger.info("going on after %s tokens", header["num_tokens"])
        num_chunks, start, num_tokens = (int(header[name]) for name in NUMBERS)
        return num_chunks, start, num_tokens


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that are not frozen, by name."""
    return (pair for pair in model.named_parameters() if pair[1].requires_grad)


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the trained parameters and AdamW's tensors, under names that include the parameter's
    name."""
    tensors = {}
    for name, parameter in trained(model):
        tensors[f"policy.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors


@torch.no_grad()
def restore(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Restore the result of `tensors_of` in place."""
    for name, parameter in trained(model):
        parameter.copy_(tensors[f"policy.{name}"])
        optimizer.state[parameter] = {
            "step": tensors[f"step.{name}"],  # AdamW requires it on the CPU
            "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device),
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device),
        }


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of the tensors, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].flatten().numpy().data)
    return found.hexdigest()
