"""New weights over NCCL: from the first trainer's GPU to the GPUs of all servers at once (vLLM's
backend `nccl`), without files.

The trainer and the servers form a separate group. It is created again when the set of servers
changes. Servers get its id through their control routes. vLLM's alternative is a TCP store, which
accepts a pickle from any client that reaches its port.

Not yet run on GPUs. On a CPU, tests run it with vLLM's servers and a substitute for the group."""

import asyncio
import base64
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tasks.common.files import ArtifactError
from tasks.engines.engine import Unavailable
from tasks.engines.trainers import rank
from tasks.engines.weights.files import numbered
from tasks.models.weights import as_saved

if TYPE_CHECKING:  # avoids a cycle: the server engine imports this module
    from tasks.engines.server.endpoints import Connection, Endpoint

PIECE_BYTES = 2**28  # additional memory on the trainer's GPU, twice while the next piece is made
LEAVE = "shutdown_weight_transfer_engine"


class Communicator(Protocol):
    """The part of vLLM's PyNcclCommunicator that is used here. The trainer is rank 0."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None: ...

    def destroy(self) -> None: ...


class NcclTransfer:
    """Transfers weights to servers with `num_gpus` GPUs each, with up to `seconds` per request."""

    repeats = False

    def __init__(self, num_gpus: int, dtype: torch.dtype, seconds: float) -> None:
        self.num_gpus, self.dtype, self.seconds = num_gpus, dtype, seconds
        self.members: tuple[Endpoint, ...] = ()
        self.group: Communicator | None = None
        self.weights: Mapping[str, torch.Tensor] = {}

    def take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        """Keep the weights for `send`. All processes but the first only gather sharded weights."""
        self.weights = weights
        if rank() > 0:
            for _ in as_saved(weights):
                pass

    async def prepare(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Create a group of these servers, unless they form one already. This is done before the
        update, while servers can still leave a group. If one server fails, all count as failed."""
        if members_of(connections) == self.members:
            return [None] * len(connections)
        self.leave()

        async def release_and_meet() -> None:
            await asyncio.gather(
                *(each.request("POST", f"{each.endpoint.root}/{LEAVE}") for each in connections)
            )
            await self.meet(connections)

        return await self.together_or_not(connections, release_and_meet())

    async def send(self, connections: "Sequence[Connection]") -> list[str | None]:
        """Send the weights to all servers. If one server fails, all count as failed: the others
        would wait forever, and must be stopped."""
        parts = numbered(self.weights, PIECE_BYTES, self.dtype)

        async def send_all() -> None:
            if members_of(connections) != self.members:  # a server has failed since `prepare`
                self.leave()
                await self.meet(connections)
            for _, part in groupby(parts, key=itemgetter(0)):
                await self.broadcast(connections, {name: tensor for _, name, tensor in part})

        answers = await self.together_or_not(connections, send_all())
        for _ in parts:  # other ranks gather sharded weights together with this one
            pass
        return answers

    async def together_or_not(
        self, connections: "Sequence[Connection]", work: Awaitable[None]
    ) -> list[str | None]:
        """Await work that succeeds for all servers or none. Return a failure or None for each."""
        try:
            await work
        except torch.OutOfMemoryError:  # not the servers' fault
            self.leave()
            raise
        except (Unavailable, ArtifactError, TimeoutError, RuntimeError) as error:
            self.leave()
            reason = str(error) or f"no response in {self.seconds:.0f} s"
            return [f"new weights did not reach the servers by NCCL: {reason}"] * len(connections)
        return [None] * len(connections)

    async def meet(self, connections: "Sequence[Connection]") -> None:
        """Create the group: the trainer is rank 0, then come the GPUs of each server in order."""
        size = 1 + self.num_gpus * len(connections)
        unique_id = make_id()
        common = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "world_size": size,
            "packed": False,
        }
        bodies = [
            {"init_info": {**common, "rank_offset": 1 + self.num_gpus * place}}
            for place in range(len(connections))
        ]
        self.group = await self.together(
            connections, "init_weight_transfer_engine", bodies, lambda: join(unique_id, size)
        )
        self.members = members_of(connections)

    async def broadcast(
        self, connections: "Sequence[Connection]", piece: Mapping[str, torch.Tensor]
    ) -> None:
        """Send one piece of the weights."""
        info = {
            "names": list(piece),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in piece.values()],
            "shapes": [list(tensor.shape) for tensor in piece.values()],
        }
        group = self.group
        assert group is not None

        def send() -> None:
            for tensor in piece.values():
                if self.group is not group:  # `leave` was called
                    return
                group.broadcast(tensor, 0)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        bodies = [{"update_info": info}] * len(connections)
        await self.together(connections, "update_weights", bodies, send)

    async def together(
        self,
        connections: "Sequence[Connection]",
        route: str,
        bodies: Sequence[Any],
        work: Callable[[], Any],
    ) -> Any:
        """Send a collective request to all servers, and do this process's part of the collective.
        Return the result of that part."""
        requests: list[Awaitable[Any]] = [
            connection.request("POST", f"{connection.endpoint.root}/{route}", body)
            for connection, body in zip(connections, bodies, strict=True)
        ]
        async with asyncio.timeout(self.seconds):
            done, *_ = await asyncio.gather(in_thread(work), *requests)
        return done

    def leave(self) -> None:
        """Destroy the group. Collectives that wait in it are aborted."""
        group, self.group, self.members = self.group, None, ()
        if group is not None:
            group.destroy()


def members_of(connections: "Sequence[Connection]") -> "tuple[Endpoint, ...]":
    return tuple(connection.endpoint for connection in connections)


def in_thread(work: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run `work` on the calling thread's device, in a daemon thread, because it may never end."""
    result: Future[Any] = Future()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            result.set_result(work())
        except BaseException as error:  # awaiting the result raises it again
            if not result.cancelled():
                result.set_exception(error)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return asyncio.wrap_future(result)


def make_id() -> bytes:
    """Return a new unique id for a group."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def join(unique_id: bytes, size: int) -> Communicator:
    """Join a group of `size` as rank 0. All other members must join at the same time."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    device = torch.accelerator.current_device_index()
    with unpinned_nccl_env():
        group: Communicator = PyNcclCommunicator.from_unique_id_bytes(unique_id, 0, size, device)
    return group
