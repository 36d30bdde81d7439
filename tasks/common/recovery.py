"""How to restore a damaged file, in words: for every message that names one."""

import hashlib
import os
from pathlib import Path

import yaml

STAGES = {
    "prompts": "ingest",
    "policy": "policy",
    "profile": "profile",
    "baseline": "baseline",
    "report": "report",
}
CELL_STAGES = {"plan": "allocate", "train": "train", "eval": "evaluate"}
"""The stage that writes a folder of the data root, and one of a recipe and a seed."""


def how_to_restore(path: Path) -> str:
    """Return how to restore a damaged output of the pipeline: a sentence that begins with a capital
    letter and has no full stop."""
    found = maker(path)
    if found is None:
        return "Delete it and run the same command again: it is restored or recreated"
    root, stage = found
    project = root if root.name != "data" else root.parent
    if not (project / "dvc.yaml").exists():  # `winnow run` cannot run it
        return f"Delete it and run the stage {stage} again"
    place = os.path.relpath(root)
    copy = damaged_copy(path)
    command = "`winnow run" + ("`" if place == "data" else f" --data {place}`")
    if stage == "policy":  # it is in git, not in DVC's cache
        return (
            f"Restore it from git (git checkout -- {os.path.relpath(path)}), or delete it and run "
            f"{command}: the stage policy recreates it"
        )
    if copy is not None:
        return (
            f"Delete it and its copy in DVC's cache, {copy}, which is damaged as well, and run "
            f"{command}: the stage {stage} recreates it"
        )
    return (
        f"Delete it and run {command}: the stage {stage} restores it from DVC's cache or "
        "recreates it"
    )


def damaged_copy(path: Path) -> Path | None:
    """Return the copy of a damaged output in DVC's cache, which no longer matches the digest in its
    name. Return None if it is intact or missing, or the cache is elsewhere. DVC itself trusts a
    copy with unchanged size and time."""
    try:
        outputs = [
            (folder / output["path"], output.get("md5"))
            for folder in path.absolute().parents
            if (folder / "dvc.lock").exists()
            for stage in yaml.safe_load((folder / "dvc.lock").read_text())["stages"].values()
            for output in stage.get("outs", [])
        ]
        digests = [value for place, value in outputs if value and place == path.absolute()]
        cache = next((f for f in path.absolute().parents if (f / ".dvc" / "cache").is_dir()), None)
        if not digests or cache is None:
            return None
        copy = cache / ".dvc" / "cache" / "files" / "md5" / digests[0][:2] / digests[0][2:]
        if not copy.is_file():
            return None
        with copy.open("rb") as file:
            is_whole = hashlib.file_digest(file, "md5").hexdigest() == digests[0]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None  # dvc.lock or the disk is damaged as well; `path` is damaged anyway
    return None if is_whole else Path(os.path.relpath(copy))


def maker(path: Path) -> tuple[Path, str] | None:
    """Return the data root of a file and the stage that writes it, or None for other files."""
    parents = (path.parent.resolve() / path.name).parents  # resolves links to a round's prompts
    if path.name == "policy.json" and parents[0].name not in CELL_STAGES:
        return parents[0], "policy"
    for folder in parents[:2]:  # a policy's files are one folder below
        if folder.name in CELL_STAGES and folder.parents[2].name == "runs":
            recipe, seed = folder.parts[-3:-1]
            return folder.parents[3], f"{CELL_STAGES[folder.name]}@{recipe}-{seed}"
    if parents[0].name in STAGES:
        return parents[1], STAGES[parents[0].name]
    return None
