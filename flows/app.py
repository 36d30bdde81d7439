"""Prefect's application, without the requests of foreign web pages.

Any page that a browser shows can send requests to this machine. By Prefect's settings (see
`flows.server`) such a page reads no answer and forges no request that changes something. Two gaps
are closed here. A page whose name has come to stand for this machine (DNS rebinding) is of the same
origin: so requests to another name than the server's are refused. And neither setting covers
WebSockets: so requests of another origin are refused."""

from typing import Any
from urllib.parse import urlsplit

from prefect.server.api.server import create_app
from prefect.settings import PREFECT_SERVER_API_HOST
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.server import LOOPBACK


class OwnPages:
    """Refuses the requests of pages of another origin."""

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
    """The application, as uvicorn asks for it."""
    names = [PREFECT_SERVER_API_HOST.value(), *LOOPBACK]
    return TrustedHostMiddleware(OwnPages(create_app()), names, www_redirect=False)
