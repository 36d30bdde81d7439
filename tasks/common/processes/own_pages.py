"""Middleware for servers of this project, which refuses the requests of foreign web pages.

Any page in a browser can send requests to this machine. A page whose host name resolves to this
machine (DNS rebinding) has the same origin as the server, so requests for any host name other than
the server's are refused. So are cross-origin requests of every kind, WebSockets included."""

from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.common.processes.ports import LOOPBACK


class OwnPages:
    """Middleware that responds with 403 to requests whose Origin header does not match the Host."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: Any = self.app
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin and urlsplit(origin).netloc != headers["host"]:
                app = PlainTextResponse("Requests of other origins are refused.", 403)
        await app(scope, receive, send)


def only_own(app: ASGIApp, *names: str) -> ASGIApp:
    """Return an application behind both checks. It answers to `names` and on loopback."""
    return TrustedHostMiddleware(OwnPages(app), [*names, *LOOPBACK], www_redirect=False)
