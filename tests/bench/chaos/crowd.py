"""64 stub servers, one of which hangs: python -m tests.bench.chaos.crowd SEED NUMBER

Runs in a world's project, with its policy on the servers. Ends with an error if rows are lost,
answered twice, delayed, or spread unevenly before the fault."""

import copy
import dataclasses
import os
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tasks.common.artifacts import Layout
from tasks.engines.engine import Request, Samples
from tasks.engines.fake import FakeEngine
from tasks.engines.server.endpoints import Endpoint
from tasks.engines.server.engine import ServerEngine
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy, read_policy
from tests.engines.serving import Server
from tests.engines.test_dispatch import MAX_ROWS, NUM_SERVERS, is_even
from tests.policies import ENGINE

SETTINGS = dataclasses.replace(ENGINE, name="server", max_rows=MAX_ROWS, timeout_seconds=600.0)
SAMPLES = 5  # per prompt
BEAT_SECONDS = 2.0  # the engine's default gives up a server after 30 s


def hang_at(server: Server, number: int) -> None:
    """Hang the server after its next `number` completions."""
    last = server.does.requests + number

    def fault(request: int) -> None:
        if request > last:
            server.does.hangs, server.does.delay = True, 2 * SETTINGS.timeout_seconds

    server.does.fault = fault


def request_of(rng: random.Random, size: int) -> Request:
    """Return a request with two prompts for each server."""
    prompts = [[rng.randrange(size) for _ in range(3)] for _ in range(2 * NUM_SERVERS)]
    rows = SAMPLES * len(prompts)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, seed=0)
    return Request(prompts, [SAMPLES] * len(prompts), range(rows), sampling)


def wrong(whole: Samples, found: Samples, shares: list[int], served: int, seconds: float) -> str:
    """Return the violations as text."""
    rows = len(whole.token_ids)
    checks = {
        f"rows are not even over the servers: {shares}": is_even(shares),
        "rows are lost or other than before": found.token_ids == whole.token_ids,
        f"{served} answers to {rows} rows": served == rows,
        f"{seconds:.0f} s were waited for": seconds < SETTINGS.timeout_seconds / 4,
    }
    return "; ".join(what for what, holds in checks.items() if not holds)


def run(policy: Policy, rng: random.Random) -> str:
    stub = FakeEngine(policy)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(copy.copy(stub), [policy.digest]))  # type: ignore[arg-type]
            for _ in range(NUM_SERVERS)
        ]
        endpoints = [Endpoint(server.url, key="k") for server in servers]
        engine = ServerEngine(SETTINGS, policy, None, endpoints)
        request = request_of(rng, stub.vocab_size)
        begun = [server.does.served for server in servers]
        whole = engine.generate(request)
        shares = [server.does.served - b for server, b in zip(servers, begun, strict=True)]
        hang_at(rng.choice(servers), rng.randrange(min(shares)))
        engine.beat_seconds = BEAT_SECONDS  # type: ignore[misc]
        before, since = sum(server.does.served for server in servers), time.monotonic()
        found, seconds = engine.generate(request), time.monotonic() - since
        served = sum(server.does.served for server in servers) - before
        return wrong(whole, found, shares, served, seconds)


if __name__ == "__main__":
    os.environ["WINNOW_FAKE_ENGINE"] = "1"
    policy = read_policy(Layout(Path("data")))
    sys.exit(run(policy, random.Random("/".join(sys.argv[1:]))) or 0)
