"""New weights as safetensors files that servers read: in a folder of this machine, or in one that
all machines of a cluster share.

They are written in pieces, so that never the whole policy is in memory once more, and they stay
until the next weights: a server that starts in between takes them from there."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

PIECE_BYTES = 2**30


def write(
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    version: str,
    piece_bytes: int = PIECE_BYTES,
) -> list[Path]:
    """Write all weights into files of about `piece_bytes`, then remove those of other versions.
    Returns the files. Every weight is asked for once, in order: sharded ones are put together by
    all ranks."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    paths: list[Path] = []
    for piece in pieces(weights, piece_bytes):
        path = folder / f"{version}-{len(paths)}.safetensors"
        save_file(piece, path)
        paths.append(path)
    for path in before.difference(paths):
        path.unlink()
    return paths


def pieces(
    weights: Mapping[str, torch.Tensor], piece_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The weights in main memory, as many at a time as are together no larger than `piece_bytes`,
    and at least one."""
    piece: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if piece and sum(each.nbytes for each in piece.values()) + tensor.nbytes > piece_bytes:
            yield piece
            piece = {}
        # safetensors refuses tensors that share memory, as tied ones do
        piece[name] = tensor.to("cpu", copy=True).contiguous()
    if piece:
        yield piece
