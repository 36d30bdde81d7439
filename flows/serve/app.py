"""The applications of Prefect and of MLflow, which refuse the requests of foreign web pages (see
`own_pages`).

Prefect's CORS and CSRF settings (see `flows.serve.server`) are not enough. MLflow's own CORS always
admits pages of every port of localhost, with credentials, and its default host names are patterns
that foreign names match (`10.*`)."""

from functools import partialmethod

from starlette.types import ASGIApp

from tasks.common.processes.own_pages import only_own
from tasks.common.tracking import database


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
