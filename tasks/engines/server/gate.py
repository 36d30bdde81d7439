"""python -P gate.py SOCKET ADDRESS PORT_FILE COMMAND...: give other machines that send the key
(WINNOW_GATE_KEY) access to a server that listens on a Unix socket.

vLLM's own key does not protect the routes that replace weights, and some of its other routes
execute code from requests. So the server has no port, and the gate forwards only the routes that
Winnow uses. It starts the server with COMMAND, and exits when the server exits.

The gate is run as a file, since importing its package would import torch, which takes seconds."""

import asyncio
import hmac
import os
import sys
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web

KEY = "WINNOW_GATE_KEY"
ROUTES = {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("GET", "/weight_info"),
    ("GET", "/is_paused"),
    ("POST", "/abort_requests"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/shutdown_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/reset_prefix_cache"),
}
MAX_BODY = 2**26  # bytes of a request: a prompt, or the names of all weights


class Gate:
    """A proxy that forwards requests to the server at the socket `path`."""

    def __init__(self, key: str, path: Path) -> None:
        self.expected = f"Bearer {key}"
        self.path = path

    async def pass_on(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self.expected.encode()):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if (request.method, request.path) not in ROUTES:
            return web.json_response({"error": "Not found"}, status=404)
        kind = request.headers.get("Content-Type")
        try:
            async with self.session.request(
                request.method,
                f"http://server{request.path_qs}",
                data=await request.read(),
                headers={"Content-Type": kind} if kind else {},
            ) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
        except (ClientError, OSError):  # the server is not up yet, or has ended
            return web.json_response({"error": "the server does not answer"}, status=503)

    async def serve(self, address: str, port_file: Path, command: list[str]) -> int:
        """Run `command`, forward to it, and return its status. Write the port to `port_file`."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self.pass_on)
        runner = web.AppRunner(app, access_log=None)
        connector = UnixConnector(str(self.path), limit=0)
        async with ClientSession(connector=connector, timeout=ClientTimeout(None)) as self.session:
            await runner.setup()
            await web.TCPSite(runner, address, 0).start()
            unfinished = port_file.with_suffix(".new")
            unfinished.write_text(str(runner.addresses[0][1]))
            unfinished.rename(port_file)
            child = await asyncio.create_subprocess_exec(*command)
            status = await child.wait()
            await runner.cleanup()
        return status


def main() -> int:
    path, address, port_file, *command = sys.argv[1:]
    gate = Gate(os.environ.pop(KEY), Path(path))  # the server does not need the key
    return asyncio.run(gate.serve(address, Path(port_file), command))


if __name__ == "__main__":
    sys.exit(main())
