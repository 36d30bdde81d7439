"""MLflow's database in a local file, created atomically, and MLflow's pages for it.

MLflow creates it in dozens of migrations. A process killed during them leaves a database that no
later process can open. So the database is created under another name and then renamed. A data
root's damaged database is set aside. A database of an older MLflow requires `mlflow db upgrade`."""

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.common.files import follow_folder, make_private_file, make_private_folder, sync_folder
from tasks.common.tracking import views
from tasks.common.tracking.runs import artifacts_beside, connect

logger = logging.getLogger(__name__)

# not a database, damaged, or without the required tables
AT_FAULT = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)


def make(path: Path, *, is_private: bool = True) -> None:
    """Create an empty database if there is none: private, or with the mode of its folder if not
    `is_private`. The caller must hold `journal.locked`."""
    if not path.exists():
        new = fresh(path)
        if not is_private:
            follow_folder(new, 0o644)
        os.replace(new, path)
        sync_folder(path.parent)


def fresh(path: Path) -> Path:
    """Create an empty database beside `path`, flushed to disk, and return its path."""
    for killed in path.parent.glob(f".{path.name}.*"):
        killed.unlink()
    # MLflow remembers the databases of this process by address
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    make_private_folder(temporary.parent)
    make_private_file(temporary)
    try:
        connect(f"sqlite:///{temporary}").search_experiments(max_results=1)
    except Exception:
        for suffix in ("", "-journal"):  # a full disk needs the space
            temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)
        raise
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    return temporary


def replace(path: Path) -> bool:
    """Replace a damaged database with an empty one. Return False if the database is missing or
    intact, or cannot be read, for example because another process has locked it."""
    if not path.is_file() or not is_damaged(path):
        return False
    new = fresh(path)
    old = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("-journal", ""):
        if path.with_name(path.name + suffix).exists():
            os.replace(path.with_name(path.name + suffix), old.with_name(old.name + suffix))
    os.replace(new, path)
    sync_folder(path.parent)
    logger.warning(
        "%s was damaged and is replaced with an empty one. It is now %s; `sqlite3 %s .recover | "
        "sqlite3 %s.recovered` recovers the readable part",
        *(path, old, old, old),
    )
    return True


def is_damaged(path: Path) -> bool:
    """Return whether a database is damaged, or is not one of MLflow's."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as database:
            database.execute("SELECT version_num FROM alembic_version")
            return bool(database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok")
    except sqlite3.DatabaseError as error:
        return error.sqlite_errorcode & 0xFF in AT_FAULT


def environment(uri: str) -> dict[str, str]:
    """Return the environment of `application` for the database `uri`: the variables in which
    MLflow's own command passes its options. Unlike it, the pages take no artifacts by proxy, which
    anybody who reaches the port could write to `mlartifacts/` of the current folder."""
    return {
        "_MLFLOW_SERVER_FILE_STORE": uri,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": artifacts_beside(uri).as_uri(),  # of new experiments
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "false",
    }


def application() -> Any:
    """Return MLflow's application (ASGI), after creating the database if it is missing."""
    from mlflow.server import app as pages
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores()
    index = Path(pages.static_folder or "", "index.html").read_text()
    pages.view_functions["serve"] = lambda: index.replace("<head>", f"<head>{views.SCRIPT}", 1)
    return app
