"""New weights as safetensors files that servers read, in a folder on this machine, or in a folder
that all machines of a cluster share.

They are written in pieces, so that memory never contains a second copy of the whole policy. A file
stays while the current weights need it: servers that start later load it."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tasks.common.files import ArtifactError
from tasks.engines.engine import attempt
from tasks.engines.trainers import gather, num_trainers, rank
from tasks.engines.weights import changes
from tasks.models import adapters
from tasks.models.folder import names_in, weight_files
from tasks.models.weights import NamedWeights, as_saved, is_saved_as_it_is, whole

if TYPE_CHECKING:  # avoids a cycle: the server engine imports this module
    from tasks.engines.server.endpoints import Connection

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**30
MAX_CHANGES = 32  # of a piece; servers read all of them at every update


class Piece(NamedTuple):
    """Some of the weights: a file, and the files of the changes to it, in order."""

    path: str
    changes: tuple[str, ...] = ()


class FileTransfer:
    """Transfers weights through files in `folder`, in the servers' `dtype`. Each of the n training
    processes writes every n-th piece. The servers initially load the files in `base`. If they can
    add the policy's adapters to these (`can_add`), rank 0 writes only the adapters. Otherwise, with
    `only_changes`, only changed elements are written, unless they take too much space."""

    repeats = True

    def __init__(
        self, folder: Path, base: Path, dtype: torch.dtype, *, only_changes: bool = False
    ) -> None:
        self.folder, self.base, self.dtype = folder, base, dtype
        self.only_changes = only_changes
        self.piece_bytes = PIECE_BYTES
        self.pieces: dict[int, Piece] = {}

    def take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        """Write the weights, and delete old files. All training processes must call this."""
        self.folder.mkdir(exist_ok=True)
        if isinstance(weights, NamedWeights) and can_add(weights, self.base):
            own = self.write_adapters(weights, version)
        else:
            own = self.write(weights, version)
        self.pieces = dict(sorted(item for each in gather(own) for item in each.items()))
        if rank() == 0:
            used = {path for piece in self.pieces.values() for path in (piece.path, *piece.changes)}
            for path in self.folder.iterdir():
                if str(path) not in used:
                    path.unlink()

    def write(self, weights: Mapping[str, torch.Tensor], version: str) -> dict[int, Piece]:
        """Write this process's pieces, and return them by number. All ranks read every weight once,
        in order, to gather sharded weights together. A thread writes the files meanwhile."""
        own: dict[int, Future[Piece]] = {}
        parts = numbered(weights, self.piece_bytes, self.dtype)
        with ThreadPoolExecutor(1) as writer:
            for number, part in groupby(parts, key=itemgetter(0)):
                # safetensors rejects tensors that share memory, such as tied weights
                tensors = {
                    name: tensor.to("cpu", copy=True)
                    for _, name, tensor in part
                    if number % num_trainers() == rank()
                }
                if tensors:
                    wait(own.values())  # at most two pieces are in memory
                    path = self.folder / f"{version}-{number}.safetensors"
                    last = self.pieces.get(number)
                    own[number] = writer.submit(self.write_piece, tensors, path, last)
        return {number: piece.result() for number, piece in own.items()}

    def write_piece(
        self, tensors: dict[str, torch.Tensor], path: Path, last: Piece | None
    ) -> Piece:
        """Write a piece or, with `only_changes`, only its changes since the `last` version, as long
        as all its changes together take at most MAX_CHANGES files and half the piece's size."""
        if last is not None and self.only_changes and len(last.changes) < MAX_CHANGES:
            try:
                size, *sizes = (Path(each).stat().st_size for each in (last.path, *last.changes))
                room = size / 2 - sum(sizes)
                changed = changes.difference(changes.read(*last), tensors, room)
            except (OSError, SafetensorError, ArtifactError) as error:
                logger.warning("%s, with its changes: %s; it is replaced", last.path, error)
                changed = None
            if changed == {}:
                return last
            if changed is not None:
                checksums = {name: changes.checksum(tensor) for name, tensor in tensors.items()}
                save_file(changed, path, metadata=checksums)
                return Piece(last.path, (*last.changes, str(path)))
        save_file(tensors, path)
        return Piece(str(path))

    def write_adapters(self, weights: NamedWeights, version: str) -> dict[int, Piece]:
        """Write the adapters, and the first time also a tied head, which is not in the policy's
        files. In all processes but the first, only gather the sharded weights."""
        tensors: dict[str, torch.Tensor] = {}
        for name, (low, high, factor) in weights.adapters.items():
            tensors |= changes.adapter(name, whole(low.detach()), whole(high.detach()), factor)
        names = [] if self.pieces else sorted(weights.keys() - names_in(self.base))
        head = {name: weights[name].to("cpu", self.dtype, copy=True) for name in names}
        if rank() > 0:
            return {}
        path = self.folder / f"{version}.safetensors"
        save_file(tensors, path)
        pieces = [Piece(str(file), (str(path),)) for file in weight_files(self.base)]
        if head:
            save_file(head, self.folder / "head.safetensors")
            pieces.append(Piece(str(self.folder / "head.safetensors")))
        return self.pieces | dict(enumerate(pieces))

    async def prepare(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Return no failures: files need no preparation."""
        return [None] * len(connections)

    async def send(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Make the servers read the weights. Return each server's failure, or None. A server that
        failed must be stopped."""
        return await asyncio.gather(*(attempt(self.send_one(each)) for each in connections))

    async def send_one(self, connection: "Connection") -> None:
        for piece in self.pieces.values():
            await connection.request(
                "POST",
                f"{connection.endpoint.root}/update_weights",
                {"update_info": {"path": piece.path, "changes": piece.changes}},
            )


def can_add(weights: NamedWeights, folder: Path) -> bool:
    """Return whether the weights are those in `folder` plus adapters. This is false if an adapted
    weight is quantized or not float32, if names differ, or if a tied head has an adapter."""
    if not weights.adapters or not is_saved_as_it_is(weights.model):
        return False
    names, adapted = names_in(folder), [weights.parts[name] for name in weights.adapters]
    is_same = weights.parts.keys() - names <= {"lm_head.weight"}
    is_quantized = any(map(adapters.is_quantized, adapted))
    is_plain = all(each.dtype == torch.float32 for each in adapted) and not is_quantized
    return is_same and weights.adapters.keys() <= names and is_plain


def numbered(
    weights: Mapping[str, torch.Tensor], piece_bytes: int, dtype: torch.dtype
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (piece number, name in a policy's files, weight); floating-point weights in `dtype`.
    Each piece contains as many weights as fit in `piece_bytes`, and at least one."""
    number, size = 0, 0
    for name, tensor in as_saved(weights):
        # tensors of integers keep their dtype
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if size and size + tensor.nbytes > piece_bytes:
            number, size = number + 1, 0
        yield number, name, tensor.contiguous()
        size += tensor.nbytes
