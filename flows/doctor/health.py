"""Checks, before a run, for faults that would make the pipeline fail."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from flows.pipeline import commands, reasons
from flows.pipeline.roots import Root
from flows.pipeline.stages import Stages
from flows.serve import server
from tasks.common.files import WriteError, require_writable
from tasks.common.params import ParamsError


def findings(root: Root) -> Any:
    """Return the faults of a data root as `flows.doctor.check.Findings`, including folders that DVC
    and Prefect cannot write."""
    from flows.doctor import check  # takes three seconds

    with contextlib.chdir(commands.ROOT):  # the stages run here: a path may be relative to it
        found = check.examine(root.params, root.layout)
    for folder in written_beside():
        try:
            require_writable(folder)
        except WriteError as error:
            found.errors.append(str(error))
    found.errors.extend(commands.broken_locks())
    return found


def written_beside() -> list[Path]:
    """Return the folders written outside the data root: DVC's cache and temporary folder, and the
    folder of Prefect's database unless PREFECT_API_URL names a server."""
    cache = reasons.cache_folder(commands.ROOT)
    return [commands.ROOT / ".dvc" / "tmp", cache, *([] if server.named_url() else [server.home()])]


def require_health(root: Root) -> None:
    """Print the remarks on a data root, and raise ParamsError with all its faults, if any."""
    found = findings(root)
    for remark in found.remarks:
        print(f"note: {remark}", file=sys.stderr, flush=True)
    if found.errors:
        raise ParamsError(f"refused: {listed(found.errors)}")


def examine(dvc: commands.Dvc, root: Root, request: Any) -> Stages:
    """Return a request's stages. If one is stale or DVC fails, raise ParamsError for any faults."""
    try:
        stages = Stages.examine(dvc, root, request)
    except (commands.CommandError, ParamsError):
        require_health(root)  # DVC and the stage `code` stop at the first fault
        raise
    if not stages.idle:
        require_health(root)
    return stages


def listed(errors: list[str]) -> str:
    count = "1 thing is wrong" if len(errors) == 1 else f"{len(errors)} things are wrong"
    return "\n".join([f"{count}:", *(f"- {error}" for error in errors)])
