"""Test events of the cheapest kinds in a world of four stages, and that every check can fail."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace

import pytest

from tests.bench.chaos import checks, operations
from tests.bench.chaos.__main__ import judge, run_event, summary
from tests.bench.chaos.events import KINDS, Event, draw
from tests.bench.chaos.making import make_world
from tests.bench.chaos.remedies import unclear
from tests.bench.chaos.world import DONE, World

STAGES = ("code", "ingest", "policy", "profile")
KILL = Event(
    number=0,
    seed=0,
    kind="kill",
    stage="profile",
    via="dvc",
    forked=True,
    level="self",
    at=0.4,
    record=False,
    how="",
)
EVENTS = [
    KILL,
    replace(KILL, kind="full disk", via="direct", at=0.2),
    replace(KILL, kind="flip"),
    replace(KILL, kind="grader killed", via="direct", how="grader"),
    replace(KILL, kind="damaged lock", how="markers"),
]

TRACEBACK = "Traceback (most recent call last):\n  File x\nOSError: 5"
STAGE_FAILED = "ERROR: failed to reproduce 'a': failed to run: exec python, exited with 1"
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or operations.compiler() is None, reason="Linux and a C compiler"
)


def test_an_event_is_drawn_from_its_number_alone() -> None:
    kinds = list(KINDS)
    drawn = [draw(0, number, kinds) for number in range(300)]
    assert drawn == [draw(0, number, kinds) for number in range(300)]
    assert {event.kind for event in drawn} == set(kinds)
    assert drawn != [draw(1, number, kinds) for number in range(300)]


def test_the_summary_names_the_losses() -> None:
    line = {**asdict(KILL), "done": {"hit": True}, "seconds": 2.0}
    lines = [
        {**line, "outcome": "survived", "failures": []},
        {**line, "number": 7, "outcome": "lost", "failures": [("outputs", "profile: a")]},
    ]
    assert "lost: 7" in summary(lines)
    assert "outputs: 1" in summary(lines)
    assert "| kill | 2 | 2 | 1 | 2 |" in summary(lines)
    assert "lost: nothing" in summary(lines[:1])


@pytest.mark.parametrize(
    ("said", "is_unclear"),
    [
        ("train: data/policy is damaged: run the stage policy again\n", False),
        (f"{TRACEBACK}\nthe disk is full\n", False),
        ("ERROR: failed to reproduce 'a': Unable to acquire lock.\n", False),
        (STAGE_FAILED.replace("with 1", "with -9"), False),  # killed: no message is possible
        (f"{TRACEBACK}\n", True),
        (f"{TRACEBACK}\n{STAGE_FAILED}\n", True),
        (f"Running stage 'a':\n> python\n{STAGE_FAILED}\n", True),
        ("\n", True),
    ],
)
def test_a_message_without_a_cause_is_unclear(said: str, is_unclear: bool) -> None:
    assert (unclear(said) is not None) == is_unclear


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("chaos")
    place = make_world(operations.build(folder), folder / "world", STAGES)
    yield place
    place.close()


@pytest.mark.slow
@pytest.mark.xdist_group("chaos")
@needs_compiler
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_nothing_is_lost(world: World, event: Event) -> None:
    line = run_event(world, event)
    assert line["done"]["hit"]
    assert line["outcome"] == "survived", line


@pytest.mark.slow
@pytest.mark.xdist_group("chaos")
@needs_compiler
def test_every_check_can_fail(world: World) -> None:
    event = replace(KILL, via="direct")

    def found() -> dict[str, str]:
        return dict(checks.failures(world, event))

    world.restore(DONE)
    assert found() == {}
    (world.data / "prompts" / "train.parquet").write_bytes(b"")
    assert "ingest: data/prompts/train.parquet" in found()["outputs"]

    world.restore(DONE)
    first, *_ = sorted(world.data.glob("store/*/*/*-*.parquet"))
    shutil.copy(first, first.with_name("0000000099-0000000099.parquet"))
    assert "stored twice" in found()["store"]
    first.unlink()
    first.with_name("0000000099-0000000099.parquet").unlink()
    assert "are lost" in found()["store"]

    world.restore(DONE)
    with closing(sqlite3.connect(world.data / "tracking" / "mlflow.db")) as database, database:
        database.execute("update runs set status = 'RUNNING' where name = 'profile'")
    assert found()["mlflow"] == "RUNNING: ['profile']"

    world.restore(DONE)
    (world.data / "profile" / ".profile.parquet.x").touch()
    (world.project / ".dvc" / "tmp" / "rwlock").write_text('{"write": {"a": {"pid": 1}}}')
    process = subprocess.Popen(["sleep", "60"], env=world.environment())
    assert {"temporary files", "dvc's lock", "processes"} <= found().keys()
    process.kill()
    process.wait()

    world.restore(DONE)
    first, *_ = sorted(world.data.glob("store/*/*/*-*.parquet"))
    shutil.copy(first, f"{first}.damaged")
    assert found()["store"] == "1 shards are set aside"

    world.restore(DONE)
    done = {"status": 1, "unclear": "it says nothing", "wrong": [("remedy", "none is named")]}
    judged = dict(judge(world, event, done, [{"status": 0}]))
    assert judged == {"unclear message": "it says nothing", "remedy": "none is named"}
