"""External disturbances of a running world: requests of foreign pages, and a dvc.lock that an
editor, a merge or a disk has damaged."""

import random
import signal
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import psutil
import websockets.exceptions
from websockets.sync.client import connect

from flows.pipeline import commands
from flows.serve import server
from tasks.common.processes.ports import free_port
from tests.bench.chaos import world as worlds
from tests.bench.chaos.events import Event
from tests.bench.chaos.faults import begin, finish, line_of, strike, wait, wait_gone
from tests.bench.chaos.remedies import DOCS, follow
from tests.bench.chaos.world import World
from tests.flows.project import Project
from tests.flows.test_serve import run_now, state_of
from tests.flows.test_server import FOREIGN, answer

REFUSED = (400, 401, 403)
FORBIDDEN = (
    "policy.source=/tmp/policy",
    "policy.trust_remote_code=true",
    "engine.urls=[http://pages.example/v1]",
    "store.location=s3://pages/store",
    "tracking.uri=http://pages.example",
)
MARKERS = "<<<<<<< HEAD\n=======\n>>>>>>> other\n"


def hostile_request(world: World, event: Event) -> dict[str, object]:
    """Send foreign requests to the server that a flow has started; or to a lasting server, with a
    scheduled run that has a forbidden override."""
    if event.how == "run":
        return forbidden_run(world, event)
    world.plan.set()
    process = begin(world, event)
    urls: list[str] = []

    def is_up() -> bool:
        urls[:] = filter(server.answers, filter(None, map(url_of, world.processes())))
        return bool(urls)

    hit = wait(process, is_up, worlds.SECONDS)
    wrong = [("hostile request", what) for url in urls for what in taken(url)]
    done = {"hit": hit, "wrong": wrong, "status": finish(process, world)}
    return {**done, "orphans": wait_gone(world, set())}


def url_of(process: psutil.Process) -> str | None:
    """Return the URL of a Prefect server."""
    _, is_server, options = line_of(process).partition("flows.serve.app:create")
    return f"http://{server.HOST}:{options.split()[3]}/api" if is_server else None


def taken(url: str) -> list[str]:
    """Return the foreign requests that are not refused."""
    port, version = urlsplit(url).port, f"{url}/admin/version"
    statuses = {
        "another host": answer(version, Host=f"pages.example:{port}")[0],
        "another origin": answer(version, Origin=FOREIGN)[0],
        "another origin's run": answer(f"{url}/flow_runs/", {}, Origin=FOREIGN)[0],
        "a run without a token": answer(f"{url}/flow_runs/", {})[0],
    }
    found = [f"{what}: {status}" for what, status in statuses.items() if status not in REFUSED]
    try:
        connect(url.replace("http", "ws", 1) + "/events/in", origin=FOREIGN, proxy=None).close()
    except websockets.exceptions.InvalidHandshake:
        return found
    return [*found, "another origin's websocket"]


def forbidden_run(world: World, event: Event) -> dict[str, object]:
    """Request a run of a schedule with an override that is forbidden from outside."""
    override, port = event.rng.choice(FORBIDDEN), free_port()
    url = f"http://{server.HOST}:{port}/api"
    kept = {name: (world.project / name).read_bytes() for name in ("params.yaml", "dvc.lock")}
    world.plan.set()
    world.log.unlink(missing_ok=True)
    line = commands.launcher(*server.arguments(server.HOST, port, "critical"))
    extra = {**server.settings(server.HOST, None), **server.FOR_ONE_RUN}
    lasting = world.start(line, **extra)
    wait(lasting, lambda: server.answers(url), worlds.SECONDS)
    wrong = taken(url)
    line = [sys.executable, "-m", "flows", "serve", "--every", "86400"]
    schedule = world.start(line, PREFECT_API_URL=url)
    project = Project(world.project, {"PREFECT_API_URL": url})
    run = run_now(project, schedule, overrides=[override])
    wait(schedule, lambda: state_of(project, run)[0] in ("FAILED", "COMPLETED"), worlds.SECONDS)
    state, message = state_of(project, run)
    if state != "FAILED" or f"{override.partition('=')[0]} cannot be set through" not in message:
        wrong.append(f"a run with {override}: {state} {message}")
    wrong += [
        f"{name} changed" for name in kept if (world.project / name).read_bytes() != kept[name]
    ]
    strike([psutil.Process(schedule.pid)], signal.SIGTERM)
    status = finish(schedule, world)
    strike([psutil.Process(lasting.pid)], signal.SIGTERM)
    finish(lasting, world)
    done = {"hit": True, "what": override, "status": status, "orphans": wait_gone(world, set())}
    return {**done, "wrong": [("hostile request", what) for what in wrong]}


def damaged_lock(world: World, event: Event) -> dict[str, object]:
    """Damage dvc.lock, run the command, and apply the remedy of its error if it fails."""
    path = world.project / "dvc.lock"
    path.write_bytes(DAMAGES[event.how](path.read_bytes(), event.rng))
    world.plan.set()
    process = begin(world, event)
    status, said = finish(process, world), world.log.read_text(errors="replace")
    done: dict[str, object] = {"hit": True, "status": status, "words": said[-500:]}
    if status:
        done |= {"remedy": follow(world, said), "words": said[-1500:]}
        if done["remedy"] is None or (event.via == "flow" and done["remedy"] == DOCS):
            done["wrong"] = [("unclear message", f"no remedy is named: {said[-500:]}")]
    return {**done, "orphans": wait_gone(world, set())}


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def with_markers(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode().splitlines(keepends=True)
    lines.insert(rng.randrange(2, len(lines)), MARKERS)
    return "".join(lines).encode()


def with_turned_bits(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": cut,
    "markers": with_markers,
    "bits": with_turned_bits,
}
ACTIONS: dict[str, Callable[[World, Event], dict[str, object]]] = {
    "hostile request": hostile_request,
    "damaged lock": damaged_lock,
}
