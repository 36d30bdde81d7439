"""vLLM's protocol for new weights, over its control routes: pause, start, update, finish with a
version, resume. The version that a server then reports is checked before its next request.

vLLM's API key does not protect these routes. Servers that are started here listen on a socket that
only this user can access, or behind a separate gate (`gate.py`)."""

from contextlib import suppress

from tasks.engines.engine import Unavailable
from tasks.engines.server.endpoints import QUICK_SECONDS, Connection

# the class that vLLM's workers import, by the name of the backend
EXTENSIONS = {"file": "tasks.engines.weights.extension.Extension"}
INITIAL = "default"  # vLLM's name for the weights that it started with
UNFINISHED = "unfinished"


async def begin(connection: Connection, *, in_flight: bool) -> None:
    """Prepare a server for new weights. Requests in flight finish first. With `in_flight`, they are
    paused instead, and continue with the new weights after another prefill of all their tokens. If
    the server hangs, raise Unavailable within QUICK_SECONDS."""
    await connection.models()
    root = connection.endpoint.root
    await connection.request("POST", f"{root}/pause?mode={'keep' if in_flight else 'wait'}")
    await connection.request("POST", f"{root}/start_weight_update")


async def finish(connection: Connection, version: str) -> None:
    """Put a server's new weights into effect under the name `version`, and clear its prefix cache,
    which contains the old policy's keys and values. On failure, raise Unavailable or ArtifactError
    with the server's name; the caller must then stop that server."""
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
    """Raise Unavailable if the server's weights are not `version`, which means that it has
    restarted or missed an update."""
    answer = await connection.request("GET", f"{connection.endpoint.root}/weight_info")
    found = answer.get("weight_version") if isinstance(answer, dict) else None
    if found != version:
        raise Unavailable(
            f"{connection.endpoint.url} has weights of version {found!r}, not {version!r}"
        )


async def leave_update(connection: Connection) -> None:
    """Finish a server's interrupted update: until then the server rejects any other update. The
    resulting weights belong to no policy, and are named UNFINISHED. A server that was only paused
    rejects the request to finish, and keeps its previous weights. A server that cannot finish
    rejects the next update. On failure, raise Unavailable or ArtifactError with the server's name;
    the caller must then stop that server."""
    url = f"{connection.endpoint.root}/is_paused"
    if (await connection.request("GET", url, seconds=QUICK_SECONDS))["is_paused"]:
        # use a separate connection: the server closes the connection of a failed request
        async with Connection(connection.endpoint, connection.seconds) as own:
            with suppress(Unavailable):
                await put_into_effect(own, UNFINISHED)
        await resume(connection)
