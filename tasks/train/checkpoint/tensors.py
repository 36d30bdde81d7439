"""The tensors of a checkpoint: one file, or for a sharded policy one file per rank with some rows
of each tensor.

Any number of ranks, including one, can read files written by any other number: each rank reads only
the rows that it stores."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from tasks.models.sharding import local, local_rows, sharded_like
from tasks.train.learner.optimizer import FIRST, PARTS, SECOND, from_parts, plain_parts

WHOLE = "tensors.safetensors"


def shard_name(rank: int, size: int) -> str:
    """Return the file name of rank `rank` out of `size`. Sorting by name puts the rows in order."""
    return f"tensors-{rank:05d}-of-{size:05d}.safetensors"


class SavedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, read lazily from `files`. The rows of a tensor may be spread over several
    files, in the order of their names."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files: dict[str, list[Path]] = {}
        for path in sorted(files):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    self.files.setdefault(name, []).append(path)

    def __getitem__(self, name: str) -> torch.Tensor:
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in self.files[name]]
            parts: list[torch.Tensor] = [file.get_tensor(name) for file in opened]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return the slice `rows` of a tensor's rows, without reading the others."""
        parts, start = list[torch.Tensor](), 0
        for path in self.files[name]:
            with safe_open(path, "pt") as file:
                held = file.get_slice(name)
                end = start + held.get_shape()[0]
                if start < rows.stop and rows.start < end:
                    parts.append(held[max(rows.start - start, 0) : rows.stop - start])
                elif not parts:
                    empty = held[:0]
            start = end
        return torch.cat(parts) if parts else empty

    def __contains__(self, name: object) -> bool:
        return name in self.files  # without reading the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the trained parameters (`policy.<name>`) and the state of AdamW (`<part>.<name>`)."""
    tensors = {}
    for name, parameter in trained_parameters(model):
        tensors[f"policy.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            for part, tensor in plain_parts(key, value).items():
                tensors[f"{part}.{name}"] = tensor
    return tensors


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: SavedTensors
) -> None:
    """Restore the tensors of `optimizer_tensors` in place; if sharded, only this rank's rows."""
    optimizer.state.clear()  # including state that the checkpoint does not contain
    with torch.no_grad():
        for name, parameter in trained_parameters(model):
            local(parameter).copy_(rows_like(parameter, tensors, f"policy.{name}"))
            if f"step.{name}" in tensors:
                on_cpu = not optimizer.defaults.get("fused")
                device = torch.device("cpu") if on_cpu else parameter.device
                optimizer.state[parameter]["step"] = tensors[f"step.{name}"].to(device)
            for key in (FIRST, SECOND):
                parts = [f"{key}/{part}.{name}" for part in PARTS]
                if parts[0] in tensors:
                    held = [tensors[part].to(parameter.device) for part in parts]
                    optimizer.state[parameter][key] = from_parts(key, held, parameter.dtype)
                if f"{key}.{name}" in tensors:
                    rows = rows_like(parameter, tensors, f"{key}.{name}").to(parameter.device)
                    optimizer.state[parameter][key] = sharded_like(parameter, rows)


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the trainable parameters with their names."""
    return [(name, part) for name, part in model.named_parameters() if part.requires_grad]


def rows_like(tensor: torch.Tensor, tensors: SavedTensors, name: str) -> torch.Tensor:
    """Return this rank's rows of `tensor` from the saved tensor `name`."""
    rows = local_rows(tensor)
    return tensors[name] if rows is None else tensors.rows(name, rows)
