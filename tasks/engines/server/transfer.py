"""vLLM's protocol for new weights, over its control routes: pause, start, update, finish with a
version, resume. What a server then says about itself is checked before it gets another request.

The routes are not guarded by vLLM's API key. Servers that are started here listen on a socket that
is this user's alone, or behind a gate of their own (`gate.py`)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from tasks.engines.engine import Unavailable
from tasks.engines.server.endpoints import QUICK_SECONDS, Connection

# the class that vLLM's workers import, by the name of the backend
EXTENSIONS = {"file": "tasks.engines.weights.extension.Extension"}
INITIAL = "default"  # what vLLM calls the weights that it started with
UNFINISHED = "unfinished"


class Transfer(Protocol):
    """How weights reach servers that are ready for them. `backend` is vLLM's name for it; where it
    `repeats`, servers can get the weights again later."""

    backend: str
    repeats: bool

    def take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        """Have these weights ready. Every weight is asked for in order: sharded ones are put
        together by all ranks."""
        ...

    async def prepare(self, connections: Sequence[Connection]) -> list[str | None]:
        """Agree with servers on how weights will come, before they are told that some do: what
        went wrong at each."""
        ...

    async def send(self, connections: Sequence[Connection]) -> list[str | None]:
        """Put the weights into servers: what went wrong at each. One that failed must be ended."""
        ...


async def begin(connection: Connection, *, in_flight: bool) -> None:
    """Make a server ready for new weights. Requests in flight are finished first; or they wait
    (`in_flight`), and go on with the new weights, which read all that was written so far again.
    A server that hangs fails within seconds."""
    await connection.models()
    root = connection.endpoint.root
    await connection.request("POST", f"{root}/pause?mode={'keep' if in_flight else 'wait'}")
    await connection.request("POST", f"{root}/start_weight_update")


async def finish(connection: Connection, version: str) -> None:
    """Put the weights that a server got into effect under the name `version`, and clear the cache,
    which holds the old policy's keys and values.

    Raises Unavailable or ArtifactError naming the server, which must then not be used."""
    await put_into_effect(connection, version)
    await resume(connection)


async def put_into_effect(connection: Connection, version: str) -> None:
    url = f"{connection.endpoint.root}/finish_weight_update"
    await connection.request("POST", url, {"weight_version": version})


async def resume(connection: Connection) -> None:
    root = connection.endpoint.root
    answer = await connection.request("POST", f"{root}/reset_prefix_cache")
    if not answer.get("success"):
        raise Unavailable(f"{connection.endpoint.url} did not reset its prefix cache")
    await connection.request("POST", f"{root}/resume")


async def check_version(connection: Connection, version: str) -> None:
    """Raise Unavailable when the server's weights are others than those of `version`: it was
    started again, or missed an update."""
    answer = await connection.request("GET", f"{connection.endpoint.root}/weight_info")
    found = answer.get("weight_version") if isinstance(answer, dict) else None
    if found != version:
        raise Unavailable(
            f"{connection.endpoint.url} holds weights of version {found!r}, not {version!r}"
        )


async def leave_update(connection: Connection) -> None:
    """Bring a server that was left in the middle of an update out of it, or it begins no other.
    What it then has is no policy's, and its name says so. A server that was only paused refuses to
    finish, and has the weights from before; one that cannot finish refuses the next update.

    Raises Unavailable or ArtifactError naming the server, which must then not be used."""
    url = f"{connection.endpoint.root}/is_paused"
    if (await connection.request("GET", url, seconds=QUICK_SECONDS))["is_paused"]:
        # a connection of its own: the server closes that of a request that fails
        async with Connection(connection.endpoint, connection.seconds) as own:
            with suppress(Unavailable):
                await put_into_effect(own, UNFINISHED)
        await resume(connection)
