"""Prefect's application, which refuses the requests of foreign web pages.

Any page in a browser can send requests to this machine. With Prefect's CORS and CSRF settings (see
`flows.serve.server`), it cannot read a response or forge a request that changes data. Two gaps are
closed here. A page whose host name resolves to this machine (DNS rebinding) has the same origin, so
requests for any host name other than the server's are refused. Neither setting covers WebSockets,
so cross-origin requests of every kind are refused.

In SQLite, a transaction that reads before it writes fails if another one commits in between. A busy
server would refuse a request again and again, so each transaction waits for the right to write."""

from functools import partialmethod
from typing import Any
from urllib.parse import urlsplit

from prefect.server.api.server import create_app
from prefect.server.database import PrefectDBInterface
from prefect.settings import PREFECT_SERVER_API_HOST
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.serve.server import LOOPBACK


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


def create() -> ASGIApp:
    """Return Prefect's application behind both checks; a factory for uvicorn."""
    transaction = partialmethod(PrefectDBInterface.session_context, with_for_update=True)
    setattr(PrefectDBInterface, "session_context", transaction)  # noqa: B010
    names = [PREFECT_SERVER_API_HOST.value(), *LOOPBACK]
    return TrustedHostMiddleware(OwnPages(create_app()), names, www_redirect=False)
