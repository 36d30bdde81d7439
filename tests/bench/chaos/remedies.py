"""The output of a failed command: whether it helps, and how to follow it."""

import re
import shlex
import subprocess
from pathlib import Path

from tests.bench.chaos import world
from tests.bench.chaos.world import World

DOCS = "as the docs say"  # a remedy that the error does not state
REMOVE = re.compile(r"(?:manually )?(?:remove|delete) '([^']+)'")
RESTORE = re.compile(r"`(git checkout HEAD -- [\w./-]+)`")
DVC_LOCK = re.compile(r"dvc\.lock'(, YAML file|, is not valid| validation failed| is invalid)")
TRACEBACK = "Traceback (most recent call last)"
# dvc's messages around a stage that ended with an error
SAYS_NOTHING = re.compile(r"Running stage|> |ERROR: failed to reproduce .*, exited with \d{1,2}$")


def follow(place: World, said: str) -> str | None:
    """Apply the remedy that an error names before the command runs again; for DVC's half-written
    files, the remedy in the docs."""
    if named := RESTORE.search(said):
        subprocess.run(shlex.split(named[1]), cwd=place.project, check=True)
        return named[1]
    if DVC_LOCK.search(said):
        line = ["git", "checkout", "--", "dvc.lock"]
        if subprocess.run(line, cwd=place.project, check=False).returncode:  # not in git yet
            world.remove(place.project / "dvc.lock")
        return DOCS
    named = REMOVE.search(said)
    if named is None and "Unable to read RWLock-file" in said:  # from plain dvc
        world.remove(place.project / ".dvc" / "tmp" / "rwlock")
        return DOCS
    if named is None or not Path(named[1]).is_relative_to(place.project):
        return None
    world.remove(Path(named[1]))
    return named[0]


def unclear(said: str) -> str | None:
    """Return why the output of a failed command does not help; None if it does."""
    lines = [line for line in said.splitlines() if line.strip() and not SAYS_NOTHING.match(line)]
    if not lines:
        return "it says nothing"
    _, found, after = "\n".join(lines).rpartition(TRACEBACK)
    words = [line for line in after.splitlines()[1:] if not line.startswith(" ")]
    if found and len(words) <= 1:  # only the error's own line
        return f"it ends in a traceback: {after[-500:]}"
    return None
