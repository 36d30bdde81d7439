"""Why a stage is out of date, in words: what dvc found changed, with the values before and after
from dvc.lock.

dvc says which parameter section or file differs and stops there. The lock remembers the values a
stage last ran with and the digests of what it read and wrote; the rest is comparing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.changes import MISSING, differences
from tasks.common.files import ArtifactError, read_json

GONE = ("deleted", "not in cache")


def read_lock(path: Path) -> dict[str, Any]:
    """The stages of dvc.lock; none when nothing has ever run."""
    return dict(params.load(path).get("stages") or {}) if path.exists() else {}


def explain(stage: str, changes: list[Any], lock: Mapping[str, Any], root: Path) -> list[str]:
    """One phrase a difference between now and the last run of `stage`."""
    if stage not in lock:
        return ["never run"]
    phrases: list[str] = []
    for change in changes:
        if isinstance(change, str):
            phrases.append(change.removeprefix("changed ") + " changed")
        else:
            phrases += explain_deps(change.get("changed deps", {}), lock[stage], lock, root)
            phrases += explain_outs(change.get("changed outs", {}))
    return phrases


def explain_deps(
    changed: Mapping[str, Any], entry: Mapping[str, Any], lock: Mapping[str, Any], root: Path
) -> list[str]:
    """Parameters key by key, code by its path, data with the digests that the lock knows."""
    before = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    now = {
        out["path"]: out.get("md5", "") for other in lock.values() for out in other.get("outs", [])
    }
    phrases: list[str] = []
    for path, how in changed.items():
        if isinstance(how, dict):
            phrases += explain_params(
                entry.get("params", {}).get(path, {}), params.load(root / path), list(how)
            )
        elif path.startswith("tasks/"):
            phrases.append(f"code {path} changed")
        elif how == "deleted":
            phrases.append(f"input missing: {path}")
        elif now.get(path, before.get(path)) != before.get(path):
            phrases.append(f"{path} {before.get(path, '')[:4] or 'new'} -> {now[path][:4]}")
        else:
            phrases.append(f"{path} changed")
    return phrases


def explain_params(
    before: Mapping[str, Any], values: Mapping[str, Any], names: list[str]
) -> list[str]:
    """The parameters under the dotted `names` that differ, as `key before -> after`."""
    return [
        phrase
        for name in names
        for phrase in differences(name, before.get(name, MISSING), find(values, name))
    ]


def find(values: Any, dotted: str) -> Any:
    """The value under a dotted name, or MISSING."""
    for key in dotted.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return MISSING
        values = values[key]
    return values


def explain_outs(changed: Mapping[str, str]) -> list[str]:
    """Outputs that are not there, in one phrase, and those that something else has changed."""
    gone = [path for path, how in changed.items() if how in GONE]
    phrases = [f"output changed since: {path}" for path, how in changed.items() if how not in GONE]
    if gone:
        phrases.insert(
            0,
            f"output missing: {gone[0]}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else ""),
        )
    return phrases


def sampled(path: Path, since: float) -> str:
    """Return what the note at `path` says about rollouts reused and sampled, if the stage has
    written it since then."""
    try:
        if path.stat().st_mtime >= since:
            return "; ".join(kind["said"] for kind in read_json(path).values())
    except (OSError, ArtifactError):
        pass  # a remark for people: no stage fails for want of it
    return ""
