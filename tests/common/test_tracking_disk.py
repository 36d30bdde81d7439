"""The record if its database or the disk accepts no writes."""

import os
import sqlite3
import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import sqlalchemy

from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.tracking import Tracking, database, track
from tests.common.record import LOCAL, away, pending_files, runs_of
from tests.full import largest_file


@pytest.mark.slow
@pytest.mark.parametrize("is_other", [False, True])
def test_damaged_database_is_replaced(
    is_other: bool, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    """Another data root names the first one's database by a relative path."""
    path = layout.tracking / "mlflow.db"
    path.write_bytes(spoiled := path.read_bytes()[:5000])
    uri = f"sqlite:///{os.path.relpath(path)}" if is_other else None
    root = Layout(layout.root / "other") if is_other else layout
    with track(Tracking(uri), root, "profile", None, None) as tracker:
        tracker.metrics({"pass_rate": 0.5})
    assert runs_of(layout)["profile"].data.metrics["pass_rate"] == 0.5
    assert [old.read_bytes() for old in layout.tracking.glob("mlflow.db.before-*")] == [spoiled]
    assert "is replaced with an empty one" in caplog.text
    assert ".recover | sqlite3" in caplog.text
    assert pending_files(layout) == []


def test_locked_database_is_not_replaced(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.3))
    path = layout.tracking / "mlflow.db"
    inode = path.stat().st_ino
    with closing(sqlite3.connect(path, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        assert not database.replace(path)
        lock.execute("ROLLBACK")
    assert path.stat().st_ino == inode
    assert [file.name for file in layout.tracking.glob("*mlflow.db*")] == ["mlflow.db"]


def test_database_is_created_atomically(bare: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bare.root / "mlflow.db"
    bare.root.mkdir()
    path.with_name(".mlflow.db.1-2").write_bytes(b"half")
    seen: list[bool] = []
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        seen.append(path.exists())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with track(Tracking(f"sqlite:///{path}"), bare, "profile", None, None):
        pass
    assert seen[:1] == [False]
    assert [file.name for file in bare.root.glob("*mlflow.db*")] == ["mlflow.db"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert not database.replace(path)


def test_unwritable_record_is_logged_once(bare: Layout, caplog: pytest.LogCaptureFixture) -> None:
    bare.root.mkdir()
    bare.tracking.write_text("a file where the folder should be")
    with track(LOCAL, bare, "profile", None, None) as tracker:
        tracker.metrics({"pass_rate": 0.5})
    assert caplog.text.count("nothing is recorded") == 1


def test_partial_line_is_removed_and_the_loss_is_logged_once(
    layout: Layout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk becomes full, the events written before can be replayed."""
    monkeypatch.setattr(tracking, "open_run", away)
    with track(LOCAL, layout, "profile", None, None) as tracker:
        (pending,) = pending_files(layout)
        with largest_file(pending.stat().st_size + 200):
            tracker.tags({"reason": "short"})
            tracker.tags({"reason": "long" * 200})
            tracker.tags({"reason": "longer" * 200})
    assert caplog.text.count("a part is not recorded") == 1
    monkeypatch.undo()
    client = tracking.connect(uri := tracking.address(LOCAL, layout))
    run = client.get_run(tracking.replay(pending, uri))
    assert (run.data.tags["reason"], run.info.status) == ("short", "FINISHED")


def test_record_begins_once_its_start_has_room(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "open_run", away)
    stage = track(LOCAL, layout, "profile", None, None)
    with largest_file(10):
        tracker = stage.__enter__()
    assert pending_files(layout) == []
    tracker.tags({"reason": "room"})
    stage.__exit__(None, None, None)
    monkeypatch.undo()
    uri = tracking.address(LOCAL, layout)
    run = tracking.connect(uri).get_run(tracking.replay(*pending_files(layout), uri))
    assert (run.data.tags["reason"], run.info.status) == ("room", "FINISHED")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a lock for less than sqlite's five seconds, or MLflow's twenty."""
    text = sqlalchemy.sql.text
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.3))
    monkeypatch.setattr(sqlalchemy.sql, "text", lambda words: text(words.replace("20000", "300")))


@pytest.mark.usefixtures("impatient")
def test_locked_database_leads_to_a_pending_file(layout: Layout) -> None:
    with track(LOCAL, layout, "profile", None, None) as tracker:
        lock = sqlite3.connect(layout.tracking / "mlflow.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        tracker.metrics({"pass_rate": 0.5})
        tracker.flush()
        tracker.metrics({"pass_rate": 0.6})
        tracker.flush()
        assert time.monotonic() - started < 60
        lock.execute("ROLLBACK")
        lock.close()
    (pending,) = pending_files(layout)
    tracking.replay(pending, tracking.address(LOCAL, layout))
    run = runs_of(layout)["profile"]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["pass_rate"] == 0.6
