"""Why a stage is out of date, as text: the changes that dvc found, with the values before and
after.

dvc names the parameter section or the file that differs, but no values. dvc.lock contains the
values of a stage's last run and the digests of its inputs and outputs; DVC's cache still contains
the digest file of the code of that run. This module compares them with the present state."""

import configparser
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.checksums import read_checked
from tasks.common.config.changes import MISSING, differences, find
from tasks.common.files import ArtifactError, read_json

GONE = ("deleted", "not in cache")
MAX_FILES = 5


def explain(
    stage: str, changes: list[Any], lock: Mapping[str, Any], root: Path, data: str = "data"
) -> list[str]:
    """Return one phrase per difference between now and the last run of `stage`. `root` is the
    project, `data` its data root."""
    if stage not in lock:
        return ["never run"]
    phrases: list[str] = []
    for change in changes:
        if isinstance(change, str):
            phrases.append(change.removeprefix("changed ") + " changed")
        else:
            deps = change.get("changed deps", {})
            phrases += explain_deps(deps, lock[stage], lock.values(), root, f"{data}/code/")
            phrases += explain_outs(change.get("changed outs", {}))
    return phrases


def explain_deps(
    changed: Mapping[str, Any],
    entry: Mapping[str, Any],
    entries: Iterable[Mapping[str, Any]],
    root: Path,
    code: str,
) -> list[str]:
    """Return a phrase per difference in the inputs: parameters key by key, code file by file, data
    by the digests in the lock `entries`. `code` is the folder of the code digests."""
    before = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    now = {out["path"]: out.get("md5", "") for other in entries for out in other.get("outs", [])}
    phrases: list[str] = []
    for path, how in changed.items():
        if isinstance(how, dict):
            ran_with = entry.get("params", {}).get(path, {})
            phrases += explain_params(ran_with, params.load(root / path), list(how))
        elif how == "deleted":
            phrases.append(f"input missing: {path}")
        elif how == "new":
            phrases.append(f"{path} is new here")
        elif path.startswith(code):
            phrases += explain_digests(path, before.get(path, ""), read_json(root / path), root)
        elif now.get(path, before.get(path)) != before.get(path):
            phrases.append(f"{path} {before.get(path, '')[:4] or 'new'} -> {now[path][:4]}")
        else:
            phrases.append(f"{path} changed")
    return phrases


def explain_digests(path: str, md5: str, now: Mapping[str, Any], root: Path) -> list[str]:
    """Return a phrase per file or library version that changed since the last run. `now` is the
    content of the digest file `path`, `md5` its DVC digest in that run."""
    before = cached_json(md5, root)
    if before is None:
        return [f"code changed ({path}; the previous one is not in DVC's cache)"]
    files = [
        f"{name} {what}"
        for name in sorted({*before["files"], *now["files"]})
        if (what := change_of(before["files"].get(name), now["files"].get(name)))
    ]
    phrases = [f"code {file}" for file in files[:MAX_FILES]]
    if len(files) > MAX_FILES:
        phrases.append(f"and {len(files) - MAX_FILES} more files")
    for name in sorted({*before["versions"], *now["versions"]}):
        old, new = before["versions"].get(name), now["versions"].get(name)
        if old != new:
            phrases.append(f"{name} {old or '(none)'} -> {new or '(none)'}")
    return phrases


def change_of(before: str | None, now: str | None) -> str:
    """Return how a file changed, as a phrase, given its two digests; empty if they are equal."""
    if before == now:
        return ""
    return "is new here" if before is None else "is no longer used" if now is None else "changed"


def cached_json(md5: str, root: Path) -> Any:
    """Return the content of the JSON file with this digest in DVC's cache; None if unreadable."""
    with suppress(OSError, ValueError):
        return json.loads((cache_folder(root) / "files" / "md5" / md5[:2] / md5[2:]).read_text())
    return None


def cache_folder(root: Path) -> Path:
    """Return the folder of DVC's cache: this machine's config.local has precedence over config.
    Raise ArtifactError if they cannot be read."""
    config = configparser.ConfigParser()
    try:
        config.read([root / ".dvc" / "config", root / ".dvc" / "config.local"])
    except (configparser.Error, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ArtifactError(f"DVC's configuration cannot be read: {why}. Repair it") from error
    return root / ".dvc" / config.get("cache", "dir", fallback="cache", raw=True)


def explain_params(
    before: Mapping[str, Any], values: Mapping[str, Any], names: list[str]
) -> list[str]:
    """Return the parameters under the dotted `names` that differ, as `key before -> after`."""
    return [
        phrase
        for name in names
        if name != "digest"  # of the others
        for phrase in differences(name, before.get(name, MISSING), find(values, name))
    ]


def explain_outs(changed: Mapping[str, str]) -> list[str]:
    """Return one phrase for all missing outputs, and one for each changed since the last run."""
    gone = [path for path, how in changed.items() if how in GONE]
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    phrases = [f"output missing: {gone[0]}{more}"] if gone else []
    return phrases + [f"output changed since: {path}" for path in changed if path not in gone]


def sampled(path: Path, since: float) -> str:
    """Return the text about reused and sampled rollouts in the note at `path` if it was written
    after `since`, in seconds since the epoch; else an empty string."""
    try:
        if path.stat().st_mtime >= since:
            return "; ".join(kind["said"] for kind in read_checked(path).values())
    except (OSError, ArtifactError):
        pass  # only information for the user: ignore errors
    return ""
