"""The applications of Prefect and of MLflow, which refuse the requests of foreign web pages.

Any page in a browser can send requests to this machine. A page whose host name resolves to this
machine (DNS rebinding) has the same origin as the server, so requests for any host name other than
the server's are refused. So are cross-origin requests of every kind, WebSockets included. Prefect's
CORS and CSRF settings (see `flows.serve.server`) leave these gaps. MLflow's own CORS always admits
pages of every port of localhost, with credentials, and its default host names are patterns that
foreign names match (`10.*`)."""

from functools import partialmethod
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.serve.server import LOOPBACK
from tasks.common.tracking import database


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


def prefect() -> ASGIApp:
    """Return Prefect's application behind the checks of `only_own`; a factory for uvicorn.

    In SQLite, a transaction that reads before it writes fails if another one commits in between,
    as is common on a busy server. So each transaction first waits for the write lock."""
    from prefect.server.api.server import create_app
    from prefect.server.database import PrefectDBInterface
    from prefect.settings import PREFECT_SERVER_API_HOST

    transaction = partialmethod(PrefectDBInterface.session_context, with_for_update=True)
    setattr(PrefectDBInterface, "session_context", transaction)  # noqa: B010
    return only_own(create_app(), PREFECT_SERVER_API_HOST.value())


def mlflow() -> ASGIApp:
    """Return MLflow's application behind both checks; a factory for uvicorn."""
    return only_own(database.application())
