"""How to get a damaged file back, in words: for every message that names one."""

import os
from pathlib import Path

STAGES = {
    "prompts": "ingest",
    "policy": "policy",
    "profile": "profile",
    "baseline": "baseline",
    "report": "report",
}
CELL_STAGES = {"plan": "allocate", "train": "train", "eval": "evaluate"}
"""The stage that writes a folder of the data root, and one of a recipe and a seed."""


def remedy(path: Path) -> str:
    """What to do about an output of the pipeline that is damaged: a sentence that begins with a
    capital letter and has no full stop."""
    found = maker(path)
    if found is None:
        return "Delete it and run the same command again: it is restored, or made again"
    root, stage = found
    from_git = f", or restore it from git (git checkout -- {path})" if stage == "policy" else ""
    if not is_of_project(root):
        return f"Delete it and run the stage {stage} again"
    place = os.path.relpath(root)
    command = "python -m flows.pipeline" + ("" if place == "data" else f" --data {place}")
    return (
        f"Delete it and run {command}: the stage {stage} restores it from DVC's cache, or makes it "
        f"again{from_git}"
    )


def maker(path: Path) -> tuple[Path, str] | None:
    """The data root that a file stands in, and the stage that writes it; None for other files."""
    parents = (path.parent.resolve() / path.name).parents  # of a round's prompts, the first's
    if path.name == "policy.json" and parents[0].name not in CELL_STAGES:
        return parents[0], "policy"
    for folder in parents[:2]:  # of a policy, the files stand one below
        if folder.name in CELL_STAGES and folder.parents[2].name == "runs":
            recipe, seed = folder.parts[-3:-1]
            return folder.parents[3], f"{CELL_STAGES[folder.name]}@{recipe}-{seed}"
    if parents[0].name in STAGES:
        return parents[1], STAGES[parents[0].name]
    return None


def is_of_project(root: Path) -> bool:
    """Whether `python -m flows.pipeline` knows the data root."""
    own = root if root.name != "data" else root.parent
    return (own / "dvc.yaml").exists()
