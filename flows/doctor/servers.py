"""Check that the model servers of `engine.urls` respond to a request for their models, and that the
engine can do what training needs.

The engine's client, and with it torch, is imported only if there is a server to check."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tasks.common import recipes
from tasks.common.files import ArtifactError
from tasks.common.params import section
from tasks.engines.engine import Unavailable
from tasks.engines.settings import EngineSettings, parse_url

Values = Mapping[str, Any]
SECONDS = 5.0


def check(values: Values) -> tuple[list[str], list[str]]:
    """Return (errors, remarks). Servers that do not respond are errors only if no server responds,
    because otherwise the engine continues with the others."""
    engine = values["engine"]
    wrong, silent, remarks = updates(values), list[str](), list[str]()
    if engine["name"] not in ("server", "auto"):
        return wrong, []
    if engine["urls"]:
        remarks.append(
            "engine.urls: training replaces weights, and is refused with servers of others; these "
            "can only profile and evaluate"
        )
    for url in engine["urls"]:
        try:
            asyncio.run(ask(parse_url(url)))
        except Unavailable as error:
            silent.append(f"engine.urls: {error}")
        except ArtifactError as error:
            wrong.append(f"engine.urls: {error}")
    if len(silent) == len(engine["urls"]):
        wrong += [f"{each}: start the server, or correct the URL" for each in silent]
        silent = []
    return wrong, [*silent, *remarks]


def updates(values: Values) -> list[str]:
    """Return an error for each recipe that loads weights into an engine that samples, unless the
    engine is `server`."""
    if section(values, "engine", EngineSettings).has_servers:
        return []
    return [
        f"recipe {name}: train.in_flight_updates needs the engine server: set engine.name to "
        "server, or in_flight_updates to false"
        for name in values["experiment"]["recipes"]
        if recipes.recipe(values, name)["train"].get("in_flight_updates")
    ]


async def ask(url: str) -> None:
    """Raise ArtifactError for a response that no engine can use, and Unavailable if there is no
    response."""
    from tasks.engines.server.endpoints import Connection, Endpoint

    async with Connection(Endpoint(url), SECONDS) as connection:
        await connection.models()
