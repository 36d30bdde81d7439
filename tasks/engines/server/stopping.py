"""The completions that servers are computing. All of them can be stopped at once."""

import asyncio
import logging
import uuid
from dataclasses import replace

from tasks.engines.engine import attempt
from tasks.engines.server.endpoints import Completion, CompletionRequest, Connection

logger = logging.getLogger(__name__)

PAUSE = 0.1  # seconds between two tries
NOT_BEGUN = Completion([], [], "abort")


class InFlight:
    """Unfinished requests to vLLM's token API. All of them can be stopped at once."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.has_failed = False
        self.in_flight: dict[str, Connection] = {}

    async def generate(self, connection: Connection, request: CompletionRequest) -> Completion:
        """Return the completion. A stopped completion has the finish reason "abort"."""
        name = uuid.uuid4().hex
        self.in_flight[name] = connection
        try:
            return await connection.generate(replace(request, name=name))
        finally:
            del self.in_flight[name]

    async def stop(self) -> None:
        """Stop all requests, and wait until each has a response or has failed. The stop is
        repeated, because a server may receive it before the request itself."""
        self.is_stopped = True
        while self.in_flight:
            names: dict[Connection, list[str]] = {}
            for name, connection in self.in_flight.items():
                names.setdefault(connection, []).append(name)
            answers = await asyncio.gather(
                *(attempt(at.stop(running)) for at, running in names.items())
            )
            failed = [answer for answer in answers if answer is not None]
            if failed and not self.has_failed:
                logger.warning("%s: waiting for its samples in flight", failed[0])
                self.has_failed = True
            await asyncio.sleep(PAUSE)
