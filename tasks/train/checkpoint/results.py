"""The results of a finished run, kept as hard links until DVC has recorded them.

When DVC cannot store the outputs of a stage, because the disk of its cache is full, it discards the
run, and deletes the outputs before the stage runs again. The checkpoints are gone by then, so hours
of training would be repeated. So a run under DVC leaves hard links to its results, which need no
disk space, and the next run with the same key restores them. The evaluation of the run, which DVC
starts after it has recorded the training, deletes them (see `Layout.unrecorded`)."""

import hashlib
import logging
import os
import shutil
from pathlib import Path

from tasks.common.files import ArtifactError, digest_folder, read_json, write_json

logger = logging.getLogger(__name__)

EVIDENCE = "curve.parquet"  # DVC's lock has its digest once DVC has recorded the run


def keep(out: Path, folder: Path, key: str) -> None:
    """Hard-link the results in `out` into `folder`, if the file system supports it."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(out, folder / "results", copy_function=os.link)
        write_json(folder / "key.json", {"key": key, "results": digest_folder(folder / "results")})
    except OSError as error:  # or `shutil.Error`, such as on a file system without hard links
        logger.debug("no results are kept in %s: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)


def restore(out: Path, folder: Path, key: str, locks: list[Path]) -> bool:
    """Restore results with this key to `out`, and return whether there were any. Delete kept
    results that are damaged, have another key, or are recorded by DVC (it is repeating the run)."""
    results = folder / "results"
    try:
        kept = read_json(folder / "key.json")
        fits = kept == {"key": key, "results": digest_folder(results)}
    except (ArtifactError, OSError):
        fits = False
    if not fits or is_recorded(results, locks):
        shutil.rmtree(folder, ignore_errors=True)
        return False
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(results, out, copy_function=os.link)
    logger.info("this run finished, but DVC did not record it: restoring its results")
    return True


def is_recorded(results: Path, locks: list[Path]) -> bool:
    """Return whether one of DVC's locks contains the digest of these results' curve."""
    name = hashlib.md5((results / EVIDENCE).read_bytes(), usedforsecurity=False).hexdigest()
    return any(name in lock.read_text() for lock in locks if lock.exists())
