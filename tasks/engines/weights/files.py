"""New weights as safetensors files that servers read: in a folder of this machine, or in one that
all machines of a cluster share.

They are written in pieces, so that never the whole policy is in memory once more, and they stay
until the next weights: a server that starts in between takes them from there."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tasks.common.files import ArtifactError
from tasks.engines.engine import Unavailable
from tasks.models.weights import as_saved

if TYPE_CHECKING:  # it is imported by the server engine itself
    from tasks.engines.server.endpoints import Connection

PIECE_BYTES = 2**30


class FileTransfer:
    """Writes weights into `folder`, in the servers' `dtype`, and has servers read them."""

    backend = "file"
    repeats = True

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.paths: list[Path] = []

    def take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        self.paths = write(weights, self.folder, version, dtype=self.dtype)

    async def prepare(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Nothing needs to be agreed on beforehand."""
        return [None] * len(connections)

    async def send(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Have the servers read the weights: what went wrong at each."""
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
    """Write all weights into files of about `piece_bytes`, then remove those of other versions.
    Returns the files. Every weight is asked for once, in order: sharded ones are put together by
    all ranks."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    paths: list[Path] = []
    # safetensors refuses tensors that share memory, as tied ones do
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
    """The weights under the names of a policy's files, in `dtype`, `place`d, as many at a time as
    are together no larger than `piece_bytes`, and at least one."""
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in as_saved(weights):
        # what is no floating-point number keeps its dtype
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if piece and size + tensor.nbytes > piece_bytes:
            yield piece
            piece, size = {}, 0
        piece[name] = place(tensor).contiguous()
        size += tensor.nbytes
    if piece:
        yield piece
