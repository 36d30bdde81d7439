"""Prefect's application, which refuses the requests of foreign web pages.

With Prefect's CORS and CSRF settings (see `flows.serve.server`), a foreign page cannot read a
response or forge a request that changes data. `flows.serve.own_pages` closes the remaining gaps.

In SQLite, a transaction that reads before it writes fails if another one commits in between. A busy
server would refuse a request again and again, so each transaction waits for the right to write."""

from functools import partialmethod

from prefect.server.api.server import create_app
from prefect.server.database import PrefectDBInterface
from prefect.settings import PREFECT_SERVER_API_HOST
from starlette.types import ASGIApp

from flows.serve.own_pages import only_own


def create() -> ASGIApp:
    """Return Prefect's application behind both checks; a factory for uvicorn."""
    transaction = partialmethod(PrefectDBInterface.session_context, with_for_update=True)
    setattr(PrefectDBInterface, "session_context", transaction)  # noqa: B010
    return only_own(create_app(), PREFECT_SERVER_API_HOST.value())
