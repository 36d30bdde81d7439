"""New weights as safetensors files that servers read, in a folder of this machine, or in a folder
that all machines of a cluster share.

They are written in pieces, so that memory never contains a second copy of the whole policy. The
files stay until the next update: a server that starts in between loads them from there."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tasks.common.files import ArtifactError
from tasks.engines.engine import Unavailable
from tasks.models.weights import as_saved

if TYPE_CHECKING:  # avoids a cycle: the server engine imports this module
    from tasks.engines.server.endpoints import Connection

PIECE_BYTES = 2**30


class FileTransfer:
    """The transfer of weights through files in `folder`, in the servers' `dtype`."""

    repeats = True

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.paths: list[Path] = []

    def take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        """Write these weights into the folder."""
        self.paths = write(weights, self.folder, version, dtype=self.dtype)

    async def prepare(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Return no failures: files need no preparation."""
        return [None] * len(connections)

    async def send(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Request that the servers read the weights. Return the failure of each server, or None. A
        server that failed must be ended."""
        return await asyncio.gather(*map(self.send_one, connections))

    async def send_one(self, connection: "Connection") -> str | None:
        try:
            for path in self.paths:
                piece = {"update_info": {"path": str(path)}}
                await connection.request(
                    "POST", f"{connection.endpoint.root}/update_weights", piece
                )
        except (Unavailable, ArtifactError) as error:
            return str(error)
        return None


def write(
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    version: str,
    piece_bytes: int = PIECE_BYTES,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Write all weights into files of about `piece_bytes`, then remove the files of other versions.
    Return the paths. Every weight is read once, in order, because all ranks gather sharded weights
    together."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    paths: list[Path] = []
    # safetensors rejects tensors that share memory, such as tied weights
    for piece in pieces(weights, piece_bytes, dtype, lambda each: each.to("cpu", copy=True)):
        path = folder / f"{version}-{len(paths)}.safetensors"
        save_file(piece, path)
        paths.append(path)
    for path in before.difference(paths):
        path.unlink()
    return paths


def pieces(
    weights: Mapping[str, torch.Tensor],
    piece_bytes: int,
    dtype: torch.dtype,
    place: Callable[[torch.Tensor], torch.Tensor] = lambda each: each,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights under the names of a policy's files, in `dtype`, moved by `place`. Each
    piece contains as many weights as fit `piece_bytes`, and at least one."""
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in as_saved(weights):
        # tensors of integers keep their dtype
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if piece and size + tensor.nbytes > piece_bytes:
            yield piece
            piece, size = {}, 0
        piece[name] = place(tensor).contiguous()
        size += tensor.nbytes
    if piece:
        yield piece
