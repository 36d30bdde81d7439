"""Disturbances of a world while its command runs."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from tests.bench.chaos import world as worlds
from tests.bench.chaos.events import Event
from tests.bench.chaos.operations import COUNT, FULL, STOP
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

Command = subprocess.Popen[bytes]
Done = dict[str, Any]


def disturb(world: World, event: Event) -> Done:
    """Run the event's command and disturb it; return the disturbance and its result."""
    done = ACTIONS[event.kind](world, event)
    world.plan.go_on()
    return done


def begin(
    world: World,
    event: Event,
    action: int = COUNT,
    at: int = 0,
    record: bool = False,
    **environment: str,
) -> Command:
    """Start the event's command, with this action at operation `at`."""
    world.plan.set(action, at, record)
    world.log.unlink(missing_ok=True)
    return world.start(event.command(world), forked=event.forked, **environment)


def wait(process: Command, ready: Callable[[], bool], seconds: float) -> bool:
    """Return whether it was ready before the process ended or the time was over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        if process.poll() is not None:
            return ready()
        time.sleep(0.004)
    return False


def finish(world: World, process: Command) -> Done:
    """Return the exit status, or None if the command had to be killed, and the processes that still
    ran long after it."""
    try:
        status: int | None = process.wait(worlds.SECONDS)
    except subprocess.TimeoutExpired:
        worlds.end(world.processes())
        process.wait()
        status = None
    return {"status": status, "orphans": wait_gone(world)}


def wait_gone(world: World, spared: Sequence[int] = ()) -> list[str]:
    """Kill and return the processes that still run long after a kill."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := [p for p in world.processes() if p.pid not in spared]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    lines = [f"{p.pid} {line_of(p)[:120]}" for p in left]
    worlds.end(left)
    return lines


def at_operation(world: World, event: Event, at: int, act: Callable[[Command], None]) -> Done:
    """Run the event's command, and `act` while a thread is stopped at operation `at`."""
    process = begin(world, event, STOP, at, event.record)
    is_reached = wait(process, lambda: bool(world.plan.reached), worlds.SECONDS)
    done = {"hit": is_reached, "operation": at, "what": world.plan.what.decode()}
    if is_reached:
        act(process)
    world.plan.go_on()
    return {**done, **finish(world, process)}


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


# --------------------------------------------------------------------------------------- victims


def line_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def victims(world: World, event: Event, command: Command) -> list[psutil.Process]:
    """Return the processes to hit: of the event's level, or of the nearest level with a process."""
    alive = {process: line_of(process) for process in world.processes()}
    module = "evaluate" if event.stage == "baseline" else event.stage
    servers = {p.pid for p, line in alive.items() if "launch" in line and " forks " in line}
    servers |= {world.forks.pid} if world.forks else set()
    stages = [p for p, line in alive.items() if f"-m tasks.{module}" in line]
    stages += [p for p in alive if p.ppid() in servers]
    by_level = {
        "flow": [p for p, line in alive.items() if "-m flows run" in line],
        "dvc": [p for p, line in alive.items() if is_dvc(line)],
        "stage": stages,
        "worker": [p for stage in stages for p in children(stage) if p not in stages],
        "self": [p for p in alive if p.pid == world.plan.pid],
        "all": [*alive],
    }
    for level in (event.level, "stage", "dvc", "flow"):
        if found := by_level[level]:
            return found if level == "all" else [event.rng.choice(found)]
    return [p for p in alive if p.pid == command.pid]


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def is_dvc(line: str) -> bool:
    return "dvc repro" in line or ("flows.pipeline.launch" in line and " dvc " in line)


def strike(found: list[psutil.Process], number: int) -> None:
    for process in found:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


# ------------------------------------------------------------------------------------- the kinds


def kill(world: World, event: Event) -> Done:
    """Kill a process at an operation of any process on a file; sometimes also in the next run."""
    number = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(event.how, signal.SIGKILL)
    rng, at = event.rng, operation_of(world, event)
    for _ in range(rng.choice(TIMES[event.kind])):
        done = at_operation(
            world, event, at, lambda command: strike(victims(world, event, command), number)
        )
        at = 1 + int(rng.random() * operation_of(world, event))
        if not done["hit"] or done["orphans"]:
            break
    return done


def kill_at_a_time(world: World, event: Event) -> Done:
    process = begin(world, event)
    after = event.at * seconds_of(world, event)
    is_over = wait(process, lambda: process.poll() is not None, after)
    if not is_over:
        strike(victims(world, event, process), signal.SIGKILL)
    return {"hit": not is_over, "after": round(after, 2), **finish(world, process)}


def container(world: World, event: Event) -> Done:
    """Kill dvc below a process that adopts its orphans and continues, in the same session."""
    below = [sys.executable, "-c", ADOPTING, *event.command(world)]
    if event.how == "bwrap" and shutil.which("bwrap"):
        below = [*BWRAP, *below]
    world.plan.set()
    world.log.unlink(missing_ok=True)
    process = world.start(below)
    wait(process, lambda: bool(dvcs(world)), 60.0)
    after = event.at * seconds_of(world, event)
    time.sleep(after)
    found = dvcs(world)
    strike(found, signal.SIGKILL)
    adopters = [p.pid for p in world.processes() if "ctypes.CDLL" in line_of(p)]
    gone = wait_gone(world, [*adopters, process.pid])
    worlds.end(world.processes())
    done = {"hit": bool(found), "after": round(after, 2)}
    return {**done, "status": process.wait(), "orphans": gone}


def dvcs(world: World) -> list[psutil.Process]:
    lines = {process: line_of(process) for process in world.processes()}
    return [p for p, line in lines.items() if is_dvc(line) and "ctypes.CDLL" not in line]


def full_disk(world: World, event: Event) -> Done:
    """Fail every operation that needs room, from a given operation on."""
    done = finish(world, begin(world, event, FULL, operation_of(world, event), event.record))
    said = said_full(world, done["status"])
    return {"hit": bool(world.plan.reached), "what": world.plan.what.decode(), **done, **said}


NAMED = ("no space left", "disk is full", "disk full", "free some")
# dvc's messages for any error of its lock file; the docs list them
DVC_SAYS = ("Unable to acquire lock", "Unlock called on an unlocked lock")


def said_full(world: World, status: int | None) -> Done:
    """Return whether a failed command named the cause."""
    said = world.log.read_text(errors="replace")
    is_named = any(words in said.lower() for words in NAMED)
    if status == 0 or is_named:
        return {"said": True}
    dvc_says = next((words for words in DVC_SAYS if words in said), False)
    return {"said": dvc_says, "words": said[-500:]}


def full_file_system(world: World, event: Event) -> Done:
    """Give the file system of the data root less room than the command may need."""
    room = int(event.at * 1.5 * worlds.grown(world, event.stage))
    world.mount()
    world.limit(room)
    done = finish(world, begin(world, event))
    said = said_full(world, done["status"])
    world.limit(None)
    return {"hit": done["status"] != 0, "room": room, **done, **said}


def flip(world: World, event: Event) -> Done:
    """Flip a bit of a file that the pipeline keeps, without changing the file's mode and times."""
    places = [world.data, world.project / ".dvc" / "cache"]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    path = event.rng.choice(
        sorted(path for path in files if not path.is_symlink() and path.stat().st_size)
    )
    state = path.stat()
    path.chmod(0o644)
    path.write_bytes(with_turned_bits(path.read_bytes(), event.rng, 1))
    path.chmod(state.st_mode)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    what = path.relative_to(world.project).as_posix()
    return {"hit": True, "what": what, **finish(world, begin(world, event))}


def gc(world: World, event: Event) -> Done:
    """Compact the store while a stage is at an operation on a file."""

    def act(_: Command) -> None:
        world.start([sys.executable, "-m", "flows", "store", "gc"]).wait(worlds.SECONDS)

    return at_operation(world, event, operation_of(world, event), act)


def beside(world: World, event: Event) -> Done:
    """Start a second command while the first is at an operation on a file."""
    process = begin(world, event, STOP, 1 + int(event.at * 40))
    wait(process, lambda: bool(world.plan.reached), worlds.SECONDS)
    line = worlds.FLOW if event.how == "flow" else ["dvc", "repro"]
    second = world.start(line, forked=event.forked)
    time.sleep(event.at)
    world.plan.go_on()
    second.wait(worlds.SECONDS)
    return {"hit": True, "what": world.plan.what.decode(), **finish(world, process)}


def graders(world: World, how: str = "") -> list[psutil.Process]:
    """Return the graders and their parent process; or only one kind, by `how`."""
    found = [p for p in world.processes() if "-m tasks.grading.verifier_worker" in line_of(p)]
    pids = {p.pid for p in found}
    return [p for p in found if not how or (p.ppid() in pids) == (how == "grader")]


def stop(
    world: World, event: Event, look: Callable[[], list[psutil.Process]]
) -> tuple[Command, list[psutil.Process]]:
    """Start the command, and stop the processes of `look` at an operation on a file. The rest can
    continue: a stopped grader still receives answers. Outside training, graders live for only a few
    operations of a stage, so the loop steps through these operations."""
    is_brief = event.kind != "machine paused" and event.stage != "train"
    passed = event.rng.randrange(3) if is_brief else 0
    process = begin(world, event, STOP, 1 if is_brief else operation_of(world, event))
    while wait(process, lambda: bool(world.plan.reached), worlds.SECONDS):
        if look():
            passed -= 1
        if passed < 0:
            break
        world.plan.step(STEP)
    found = stop_all(process, look)
    world.plan.go_on()
    return process, found


def stop_all(process: Command, look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    wait(process, lambda: bool(look()), worlds.SECONDS)
    stopped: list[psutil.Process] = []
    while new := [p for p in look() if p not in stopped]:  # one may have started meanwhile
        strike(new, signal.SIGSTOP)
        stopped += new
    return stopped


def kill_grader(world: World, event: Event) -> Done:
    """Kill graders after a short stop, so that most have answers to grade; sometimes twice."""
    rng, hit = event.rng, 0
    process, found = stop(world, event, lambda: graders(world, event.how))
    for turn in range(rng.choice((1, 1, 2))):
        if turn:
            found = stop_all(process, lambda: graders(world, event.how))
        time.sleep(rng.random())
        strike(found, signal.SIGKILL)
        hit += len(found)
    return {"hit": hit > 0, "what": f"{hit} killed", **finish(world, process)}


def pause(world: World, event: Event) -> Done:
    """Stop the graders, or all processes, for longer than the time limit of an answer."""
    is_all = event.kind == "machine paused"
    process, found = stop(world, event, world.processes if is_all else lambda: graders(world))
    time.sleep(PAUSE_SECONDS)
    strike(found, signal.SIGCONT)
    return {"hit": bool(found), "what": f"{len(found)} stopped", **finish(world, process)}


def damaged_lock(world: World, event: Event) -> Done:
    """Damage dvc.lock, run the command, and apply the remedy of its error if it fails."""
    path, rng = world.project / "dvc.lock", event.rng
    content = path.read_bytes()
    if event.how == "cut":
        content = content[: rng.randrange(len(content))]
    elif event.how == "markers":
        lines = content.decode().splitlines(keepends=True)
        lines.insert(rng.randrange(2, len(lines)), MARKERS)
        content = "".join(lines).encode()
    else:
        content = with_turned_bits(content, rng, rng.randint(1, 4))
    path.write_bytes(content)
    done = finish(world, begin(world, event))
    said = world.log.read_text(errors="replace")
    done |= {"hit": True, "words": said[-1500:]}
    if done["status"]:
        done["remedy"] = follow(world, said)
        if done["remedy"] is None or (event.via == "flow" and done["remedy"] == DOCS):
            done["wrong"] = [("unclear message", f"no remedy is named: {said[-500:]}")]
    return done


def with_turned_bits(content: bytes, rng: random.Random, number: int) -> bytes:
    damaged = bytearray(content)
    for _ in range(number):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


ACTIONS: dict[str, Callable[[World, Event], Done]] = {
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
