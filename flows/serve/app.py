"""Prefect's application, which refuses the requests of foreign web pages.

Any page in a browser can send requests to this machine. With Prefect's settings (see
`flows.serve.server`) such a page cannot read an answer or forge a request that changes something.
Two gaps are closed here. A page with a name that resolves to this machine (DNS rebinding) has the
same origin, so requests for another name than the server's are refused. Neither setting covers
WebSockets, so requests of another origin are refused."""

from typing import Any
from urllib.parse import urlsplit

from prefect.server.api.server import create_app
from prefect.settings import PREFECT_SERVER_API_HOST
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.serve.server import LOOPBACK


class OwnPages:
    """Middleware that refuses requests from pages of another origin."""

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


def create() -> ASGIApp:
    """Return Prefect's application with OwnPages; a factory for uvicorn."""
    names = [PREFECT_SERVER_API_HOST.value(), *LOOPBACK]
    return TrustedHostMiddleware(OwnPages(create_app()), names, www_redirect=False)
