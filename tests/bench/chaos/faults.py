"""Disturbances of a world while its command runs."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.bench.chaos import world as worlds
from tests.bench.chaos.events import Event
from tests.bench.chaos.operations import FULL, STOP
from tests.bench.chaos.remedies import DOCS, follow
from tests.bench.chaos.world import World

GONE_SECONDS = 30.0  # a process that is still importing ends after that
ADOPTING = (
    "import ctypes, subprocess, sys, time; ctypes.CDLL(None).prctl(36, 1); "
    "subprocess.run(sys.argv[1:]); time.sleep(600)"
)
TIMES = {"kill": (1, 1, 1, 1, 2, 3), "interrupt": (1,)}  # kills in a row
STEP = 3  # operations
PAUSE_SECONDS = 6.0  # longer than an answer's limit in wall time (`verify`, in `making`)
MARKERS = "<<<<<<< HEAD\n=======\n>>>>>>> other\n"
BWRAP = ("bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid")


def operation_of(world: World, event: Event) -> int:
    """Return the number of the operation to disturb."""
    names = [event.stage]
    if event.via == "flow":
        names = world.stages[world.stages.index(event.stage) :]
    facts = [world.facts["stages"][n]["direct" if event.via == "direct" else "dvc"] for n in names]
    total = sum(f["operations"] + (f["on_record"] if event.record else 0) for f in facts)
    return 1 + int(event.at * total)


def seconds_of(world: World, event: Event) -> float:
    facts = world.facts["stages"][event.stage]
    usual = float(facts["direct" if event.via == "direct" else "dvc"]["seconds"])
    return usual * (1.0 if event.forked else 2.0) + (6.0 if event.via == "flow" else 0.0)


def wait(process: "subprocess.Popen[bytes]", ready: Callable[[], bool], seconds: float) -> bool:
    """Return whether it was ready before the process ended or the time was over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        if process.poll() is not None:
            return ready()
        time.sleep(0.004)
    return False


def finish(process: "subprocess.Popen[bytes]", world: World) -> int | None:
    """Return the exit status, or None if the command had to be killed."""
    try:
        return process.wait(worlds.SECONDS)
    except subprocess.TimeoutExpired:
        worlds.end(world.processes())
        process.wait()
        return None


def begin(world: World, event: Event) -> "subprocess.Popen[bytes]":
    world.log.unlink(missing_ok=True)
    return world.start(event.command(world), forked=event.forked)


# --------------------------------------------------------------------------------------- victims


def line_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def victims(world: World, event: Event, first: int) -> tuple[str, list[psutil.Process]]:
    """Return the level and the processes to hit: of the event's level, or of the nearest level with
    a process. `first` is the command."""
    alive = [process for process in world.processes() if process.is_running()]
    module = "evaluate" if event.stage == "baseline" else event.stage
    forks = [p for p in alive if p.ppid() in servers(world, alive)]
    commands = [p for p in alive if f"-m tasks.{module}" in line_of(p)]
    stages = [*commands, *forks]
    by_level = {
        "flow": [p for p in alive if "-m flows run" in line_of(p)],
        "dvc": [p for p in alive if is_dvc(line_of(p))],
        "stage": stages,
        "worker": [p for s in stages for p in children(s) if p not in stages],
        "self": [p for p in alive if p.pid == world.plan.pid],
        "all": alive,
    }
    for level in (event.level, "stage", "dvc", "flow"):
        if found := by_level[level]:
            return level, found if level == "all" else [event.rng.choice(found)]
    return "command", [p for p in alive if p.pid == first]


def servers(world: World, alive: list[psutil.Process]) -> set[int]:
    own = {world.forks.pid} if world.forks else set()
    return own | {
        p.pid for p in alive if "flows.pipeline.launch" in line_of(p) and " forks " in line_of(p)
    }


def is_dvc(line: str) -> bool:
    return "dvc repro" in line or ("flows.pipeline.launch" in line and " dvc " in line)


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def strike(found: list[psutil.Process], number: int) -> None:
    for process in found:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def wait_gone(world: World, spared: set[int]) -> list[str]:
    """Kill and return the processes that still run long after a kill."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        left = [p for p in world.processes() if p.pid not in spared]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    lines = [f"{p.pid} {line_of(p)[:120]}" for p in left]
    worlds.end(left)
    return lines


# ------------------------------------------------------------------------------------- the kinds


def kill(world: World, event: Event) -> dict[str, object]:
    """Kill a process at an operation of any process on a file; sometimes also in the next run."""
    times = event.rng.choice(TIMES[event.kind])
    done = strike_at(world, event, operation_of(world, event))
    for _ in range(times - 1):
        if not done["hit"] or done["orphans"]:
            break
        at = 1 + int(event.rng.random() * operation_of(world, event))
        done = {**strike_at(world, event, at), "earlier": done}
    return done


def strike_at(world: World, event: Event, at: int) -> dict[str, object]:
    number = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(event.how, signal.SIGKILL)
    world.plan.set(STOP, at, event.record)
    process = begin(world, event)
    if not wait(process, lambda: world.plan.reached, worlds.SECONDS):
        return {"hit": False, "status": finish(process, world), "orphans": []}
    level, found = victims(world, event, process.pid)
    strike(found, number)
    world.plan.go_on()
    done = {"hit": True, "operation": at, "what": world.plan.what, "hit_level": level}
    return {**done, "status": finish(process, world), "orphans": wait_gone(world, set())}


def kill_at_a_time(world: World, event: Event) -> dict[str, object]:
    world.plan.set()
    process = begin(world, event)
    after = event.at * seconds_of(world, event)
    if wait(process, lambda: False, after) or process.poll() is not None:
        return {"hit": False, "status": finish(process, world)}
    level, found = victims(world, event, process.pid)
    strike(found, signal.SIGKILL)
    done = {"hit": True, "after": round(after, 2), "hit_level": level}
    return {**done, "status": finish(process, world), "orphans": wait_gone(world, set())}


def container(world: World, event: Event) -> dict[str, object]:
    """Kill dvc below a process that adopts its orphans and continues, in the same session."""
    command = event.command(world)
    below = [sys.executable, "-c", ADOPTING, *command]
    if event.how == "bwrap" and shutil.which("bwrap"):
        below = [*BWRAP, *below]
    world.plan.set()
    world.log.unlink(missing_ok=True)
    process = world.start(below)
    after = event.at * seconds_of(world, event)
    stage_runs = wait(process, lambda: bool(dvcs(world)), 60.0)
    time.sleep(after)
    found = dvcs(world)
    strike(found, signal.SIGKILL)
    adopters = {p.pid for p in world.processes() if "ctypes.CDLL" in line_of(p)}
    done = {"hit": bool(found) and stage_runs, "after": round(after, 2), "hit_level": "dvc"}
    gone = wait_gone(world, adopters | {process.pid})
    worlds.end(world.processes())
    return {**done, "status": process.wait(), "orphans": gone}


def dvcs(world: World) -> list[psutil.Process]:
    found = [p for p in world.processes() if is_dvc(line_of(p))]
    return [p for p in found if "ctypes.CDLL" not in line_of(p)]


def full_disk(world: World, event: Event) -> dict[str, object]:
    """Fail every operation that needs room, from a given operation on."""
    at = operation_of(world, event)
    world.plan.set(FULL, at, event.record)
    process = begin(world, event)
    status = finish(process, world)
    done = {"hit": world.plan.reached, "operation": at, "what": world.plan.what, "status": status}
    return {**done, "orphans": wait_gone(world, set()), **said_full(world, status)}


NAMED = ("no space left", "disk is full", "disk full", "free some")
# dvc's messages for any error of its lock file; the docs list them
DVC_SAYS = ("Unable to acquire lock", "Unlock called on an unlocked lock")


def said_full(world: World, status: int | None) -> dict[str, object]:
    """Return whether a failed command named the cause."""
    said = world.log.read_text(errors="replace")
    is_named = any(words in said.lower() for words in NAMED)
    if status == 0 or is_named:
        return {"said": True}
    dvc_says = next((words for words in DVC_SAYS if words in said), False)
    return {"said": dvc_says, "words": said[-500:]}


def full_file_system(world: World, event: Event) -> dict[str, object]:
    """Give the file system of the data root less room than the command may need."""
    room = int(event.at * 1.5 * worlds.grown(world, event.stage))
    world.mount()
    world.limit(room)
    world.plan.set()
    process = begin(world, event)
    status = finish(process, world)
    done = {"hit": status != 0, "room": room, "status": status}
    said, left = said_full(world, status), wait_gone(world, set())
    world.limit(None)
    return {**done, "orphans": left, **said}


def flip(world: World, event: Event) -> dict[str, object]:
    """Flip a bit of a file that the pipeline keeps, without changing the file's times."""
    rng = event.rng
    places = [world.data, world.project / ".dvc" / "cache"]
    files = sorted(
        path
        for place in places
        for path in place.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size
    )
    path = rng.choice(files)
    name = path.relative_to(world.project).as_posix()
    bit = turn(path, rng)
    world.plan.set()
    process = begin(world, event)
    return {"hit": True, "what": f"bit {bit} of {name}", "status": finish(process, world)}


def turn(path: Path, rng: random.Random) -> int:
    state, content = path.stat(), bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    mode = state.st_mode
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(mode)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return bit


def gc(world: World, event: Event) -> dict[str, object]:
    """Compact the store while a stage is at an operation on a file."""
    at = operation_of(world, event)
    world.plan.set(STOP, at, False)
    process = begin(world, event)
    if not wait(process, lambda: world.plan.reached, worlds.SECONDS):
        return {"hit": False, "status": finish(process, world)}
    line = [sys.executable, "-m", "flows", "store", "gc"]
    cleaned = world.start(line).wait(worlds.SECONDS)
    world.plan.go_on()
    done = {"hit": True, "operation": at, "what": world.plan.what, "gc": cleaned}
    return {**done, "status": finish(process, world), "orphans": wait_gone(world, set())}


def beside(world: World, event: Event) -> dict[str, object]:
    """Start a second command while the first is at an operation on a file."""
    world.plan.set(STOP, 1 + int(event.at * 40), False)
    process = begin(world, event)
    wait(process, lambda: world.plan.reached, worlds.SECONDS)
    line = worlds.FLOW if event.how == "flow" else ["dvc", "repro"]
    second = world.start(line, forked=event.forked)
    time.sleep(event.at)
    world.plan.go_on()
    done = {"hit": True, "what": world.plan.what, "second": finish(second, world)}
    return {**done, "status": finish(process, world), "orphans": wait_gone(world, set())}


def graders(world: World, how: str = "") -> list[psutil.Process]:
    """Return the graders and their parent process; or only one kind, by `how`."""
    found = [p for p in world.processes() if "-m tasks.grading.verifier_worker" in line_of(p)]
    pids = {p.pid for p in found}
    return [p for p in found if not how or (p.ppid() in pids) == (how == "grader")]


def stop(
    world: World, event: Event, look: Callable[[], list[psutil.Process]]
) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    """Start the command, and stop the processes of `look` at an operation on a file. The rest can
    continue: a stopped grader still receives answers. Outside training, graders live for only a few
    operations of a stage, so the loop steps through these operations."""
    is_brief = event.kind != "machine paused" and event.stage != "train"
    passed = event.rng.randrange(3) if is_brief else 0
    world.plan.set(STOP, 1 if is_brief else operation_of(world, event), False)
    process = begin(world, event)
    while wait(process, lambda: world.plan.reached, worlds.SECONDS):
        if look():
            passed -= 1
        if passed < 0:
            break
        world.plan.step(STEP)
    return process, stop_all(process, look)


def stop_all(
    process: "subprocess.Popen[bytes]", look: Callable[[], list[psutil.Process]]
) -> list[psutil.Process]:
    wait(process, lambda: bool(look()), worlds.SECONDS)
    stopped: list[psutil.Process] = []
    while new := [p for p in look() if p not in stopped]:  # one may have started meanwhile
        strike(new, signal.SIGSTOP)
        stopped += new
    return stopped


def kill_grader(world: World, event: Event) -> dict[str, object]:
    """Kill graders after a short stop, so that most have answers to grade."""
    rng, hit = event.rng, 0
    process, found = stop(world, event, lambda: graders(world, event.how))
    for turn in range(rng.choice((1, 1, 2))):
        if turn:
            found = stop_all(process, lambda: graders(world, event.how))
        world.plan.go_on()
        time.sleep(rng.random())
        strike(found, signal.SIGKILL)
        hit += len(found)
    done = {"hit": hit > 0, "what": f"{hit} killed", "status": finish(process, world)}
    return {**done, "orphans": wait_gone(world, set())}


def pause(world: World, event: Event) -> dict[str, object]:
    """Stop the graders, or all processes, for longer than the time limit of an answer."""
    is_all = event.kind == "machine paused"
    process, found = stop(world, event, world.processes if is_all else lambda: graders(world))
    world.plan.go_on()
    time.sleep(PAUSE_SECONDS)
    strike(found, signal.SIGCONT)
    done = {"hit": bool(found), "what": f"{len(found)} stopped", "status": finish(process, world)}
    return {**done, "orphans": wait_gone(world, set())}


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
    "kill": kill,
    "kill at a time": kill_at_a_time,
    "interrupt": kill,
    "container": container,
    "full disk": full_disk,
    "full file system": full_file_system,
    "flip": flip,
    "gc": gc,
    "beside": beside,
    "grader killed": kill_grader,
    "grader paused": pause,
    "machine paused": pause,
    "damaged lock": damaged_lock,
}
