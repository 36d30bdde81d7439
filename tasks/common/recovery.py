"""Advice on how to restore a damaged file, for every message about one."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import yaml


def how_to_restore(path: Path) -> str:
    """Return how to restore a damaged output of the pipeline: a sentence that begins with a capital
    letter and has no full stop."""
    place = path.parent.resolve() / path.name
    project = next((f for f in place.parents if (f / ".dvc").is_dir()), Path("/"))
    record = recorded(place, project)
    if record is None:
        return "Delete it and run the same command again: it is restored or recreated"
    root, stage, digest = record
    is_main = root == project
    command = "`winnow run" + ("`" if is_main else f" --data {root.relative_to(project)}`")
    if copy := damaged_copy(project / ".dvc" / "cache" / "files" / "md5", digest):
        return (
            f"Delete it and its copy in DVC's cache, {os.path.relpath(copy)}, which is damaged as "
            f"well, and run {command}: the stage {stage} recreates it"
        )
    return (
        f"Delete it and run {command}: the stage {stage} restores it from DVC's cache or "
        "recreates it"
    )


def recorded(path: Path, project: Path) -> tuple[Path, str, str] | None:
    """Return (folder of the dvc.lock, stage, digest) for the output that is `path` or contains it;
    None if there is none. The paths in every dvc.lock of a project are relative to the project."""
    for folder in (f for f in path.parents if f.is_relative_to(project)):
        with suppress(OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
            stages = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
            for stage, entry in stages.items():
                for output in entry.get("outs", []):
                    if path.is_relative_to(project / output["path"]):
                        return folder, stage, str(output["md5"])
    return None


def damaged_copy(cache: Path, digest: str) -> Path | None:
    """Return the copy of an output in DVC's cache that no longer matches the digest in its name;
    for a folder, the copy of its file list or of one file. Return None if all are intact or
    missing, or if the cache is elsewhere. DVC itself trusts a copy with unchanged size and time."""
    copy = cache / digest[:2] / digest[2:]
    try:
        with copy.open("rb") as file:
            if hashlib.file_digest(file, "md5").hexdigest() != digest.removesuffix(".dir"):
                return copy
        listed = json.loads(copy.read_bytes()) if digest.endswith(".dir") else []
    except OSError:
        return None
    return next(filter(None, (damaged_copy(cache, file["md5"]) for file in listed)), None)
