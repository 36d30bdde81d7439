"""MLflow's database under the data root, created atomically.

MLflow creates it in dozens of migrations. A process killed during them leaves a database that no
later process can open. So it is created under another name and renamed. A database that is half
made or of another version of MLflow is upgraded if MLflow's own command can do so. Any other
database that cannot be opened, such as a damaged one, is set aside under another name."""

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from tasks.common.files import make_private_file, make_private_folder, sync_folder
from tasks.common.tracking.runs import connect

logger = logging.getLogger(__name__)

# not a database, damaged, or without the required tables
AT_FAULT = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)


def make(path: Path) -> None:
    """Create an empty database, if there is none. One process at a time: see `journal.locked`."""
    if not path.exists():
        os.replace(fresh(path), path)
        sync_folder(path.parent)


def fresh(path: Path) -> Path:
    """Return the path of a new empty database beside `path`, flushed to the disk."""
    for killed in path.parent.glob(f".{path.name}.*"):
        killed.unlink()
    # MLflow remembers the databases of this process by address
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    make_private_folder(temporary.parent)
    make_private_file(temporary)
    try:
        connect(f"sqlite:///{temporary}").search_experiments(max_results=1)
    except Exception:
        remove(temporary)  # a full disk needs the space
        raise
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    return temporary


def replace(path: Path) -> bool:
    """Replace a database that cannot be opened with a working one. Return False if it is not
    faulty: it is missing, intact, or cannot be read, for example because another process has locked
    it."""
    if not path.is_file():
        return False
    try:
        found = shape(path)
    except sqlite3.DatabaseError:
        return False
    new = fresh(path)
    if found == shape(new):
        remove(new)
        return False
    old = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    current = upgraded(path, new)
    for suffix in ("-journal", ""):
        if path.with_name(path.name + suffix).exists():
            os.replace(path.with_name(path.name + suffix), old.with_name(old.name + suffix))
    os.replace(current or new, path)
    sync_folder(path.parent)
    what = (
        f"brought up to date; the file as it was is kept as {old}"
        if current
        else f"replaced by an empty one; it is now {old}, and `sqlite3 {old} .recover | sqlite3 "
        f"{old}.recovered` makes a database of what can be read of it"
    )
    logger.warning("%s was half made, damaged or of another version: %s", path, what)
    return True


def shape(path: Path) -> tuple[str, ...]:
    """Return the version of its schema and the names of its tables, or the fault if it is damaged
    or half made. Raise sqlite3.DatabaseError if neither can be determined."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as database:
            version = [
                row[0] for row in database.execute("SELECT version_num FROM alembic_version")
            ]
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            names = sorted(row[0] for row in tables)
            sound = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            return (sound, *version, *names)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in AT_FAULT:
            raise
        return (str(error),)


def upgraded(path: Path, new: Path) -> Path | None:
    """Return a copy of the database that MLflow's own command has upgraded to the schema of `new`,
    or None if it is damaged or the upgrade fails."""
    copy = path.with_name(f".{path.name}.upgraded")
    remove(copy)
    for suffix in ("-journal", ""):
        if path.with_name(path.name + suffix).exists():
            shutil.copy(path.with_name(path.name + suffix), copy.with_name(copy.name + suffix))
    if shape(copy)[0] == "ok":
        command = [sys.executable, "-m", "mlflow", "db", "upgrade", f"sqlite:///{copy}"]
        subprocess.run(command, capture_output=True, check=False)
    if shape(copy) == shape(new):
        remove(new)
        return copy
    remove(copy)
    return None


def remove(path: Path) -> None:
    """Delete a database and its journal, if they exist."""
    for suffix in ("", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
