"""Check that the model servers of `engine.urls` respond to a request for their models.

The engine's client, and with it torch, is imported only if there is a server to check."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tasks.common.files import ArtifactError
from tasks.engines.engine import Unavailable
from tasks.engines.settings import parse_url

Values = Mapping[str, Any]
SECONDS = 5.0


def check(values: Values) -> tuple[list[str], list[str]]:
    """Return (errors, remarks). Servers that do not respond are errors only if no server responds,
    because otherwise the engine continues with the others."""
    engine = values["engine"]
    if engine["name"] not in ("server", "auto"):
        return [], []
    wrong, silent = list[str](), list[str]()
    for url in engine["urls"]:
        try:
            asyncio.run(ask(parse_url(url)))
        except Unavailable as error:
            silent.append(f"engine.urls: {error}")
        except ArtifactError as error:
            wrong.append(f"engine.urls: {error}")
    if len(silent) == len(engine["urls"]):
        return [*wrong, *(f"{each}: start the server, or correct the URL" for each in silent)], []
    return wrong, silent


async def ask(url: str) -> None:
    """Raise ArtifactError for a response that no engine can use, and Unavailable if there is no
    response."""
    from tasks.engines.server.endpoints import Connection, Endpoint

    async with Connection(Endpoint(url), SECONDS) as connection:
        await connection.models()
