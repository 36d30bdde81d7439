"""Changes to weights in safetensors files, which the trainer writes and servers apply: low-rank
adapters, or the elements whose bits differ from the previous weights (SparseRL-Sync, arXiv
2605.07330). The policy's other weights need not be written again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tasks.common.files import ArtifactError
from tasks.models.adapters import add_delta

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def read(
    path: str | Path, changes: Sequence[str | Path] = (), device: str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) for every weight in a file, after applying the files `changes` in order.
    Raise ArtifactError if a weight then differs from its checksum in the last of these files."""
    with ExitStack() as stack:
        file, *others = (
            stack.enter_context(safe_open(each, framework="pt", device=device))
            for each in (path, *changes)
        )
        names = [set(each.keys()) for each in others]
        checksums = (others[-1].metadata() or {}) if others else {}
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            if any(f"{name}.index" in stored for stored in names):
                weight = weight.clone()  # not the file's memory
            for other, stored in zip(others, names, strict=True):
                if f"{name}.index" in stored:
                    index = other.get_tensor(f"{name}.index").long()
                    bits(weight)[index] = bits(other.get_tensor(f"{name}.value"))
                if f"{name}.low" in stored:
                    weight = add_adapter(name, weight, other)
            if name in checksums and checksums[name] != checksum(weight):
                raise ArtifactError(
                    f"{path}: with the changes up to {changes[-1]}, the weight {name} has another "
                    "checksum than at the trainer"
                )
            yield name, weight


def add_adapter(name: str, weight: torch.Tensor, file: Any) -> torch.Tensor:
    low, high, factor = (file.get_tensor(f"{name}.{part}") for part in ("low", "high", "factor"))
    return add_delta(weight.to(low.dtype), low, high, factor.item())


def adapter(
    name: str, low: torch.Tensor, high: torch.Tensor, factor: float
) -> dict[str, torch.Tensor]:
    """Return a weight's adapter, `low` [rank, in] and `high` [out, rank], as tensors for a file."""
    parts = {"low": low.contiguous(), "high": high.contiguous()}
    named = {**parts, "factor": torch.tensor(factor, dtype=torch.float64)}
    return {f"{name}.{part}": tensor.cpu() for part, tensor in named.items()}


def difference(
    old: Iterator[tuple[str, torch.Tensor]], new: Mapping[str, torch.Tensor], max_bytes: float
) -> dict[str, torch.Tensor] | None:
    """Return the elements that differ in any bit, as named tensors for a file: their indices in the
    flattened weight, and their new values. NaN and the sign of zero are kept. Return None if they
    take more than `max_bytes`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in old:
        is_other = bits(weight) != bits(new[name])
        index_dtype = torch.int32 if weight.numel() < 2**31 else torch.int64
        num = int(is_other.sum())
        max_bytes -= num * (index_dtype.itemsize + weight.element_size())
        if max_bytes < 0:
            return None
        if num:
            index = is_other.nonzero().view(-1)
            tensors[f"{name}.value"] = new[name].view(-1)[index]
            tensors[f"{name}.index"] = index.to(index_dtype)
    return tensors


def bits(weight: torch.Tensor) -> torch.Tensor:
    """Return a contiguous weight as a flat view of integers."""
    return weight.view(-1).view(INTEGERS[weight.element_size()])


def checksum(weight: torch.Tensor) -> str:
    """Return a checksum that very likely differs if a change is missing: the sum of the elements'
    bits, as text."""
    return str(bits(weight.contiguous()).sum(dtype=torch.int64).item())
