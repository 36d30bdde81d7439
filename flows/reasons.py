"""Why a stage is out of date, in words: what dvc found changed, with the values before and after.

dvc says which parameter section or file differs and stops there. The lock remembers the values a
stage last ran with and the digests of what it read and wrote; DVC's cache still has the digest file
of the code that it ran with. The rest is comparing."""

import configparser
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.changes import MISSING, differences, find
from tasks.common.files import ArtifactError, read_json
from tasks.common.sealed import read_sealed

GONE = ("deleted", "not in cache")
MAX_FILES = 5


def explain(
    stage: str,
    changes: list[Any],
    lock: Mapping[str, Any],
    root: Path,
    data: str = "data",
    made: Iterable[Mapping[str, Any]] = (),
) -> list[str]:
    """One phrase a difference between now and the last run of `stage`, in the data root `data` of
    the project `root`. `made` are entries of other locks, whose outputs it may read."""
    if stage not in lock:
        return ["never run"]
    entries = [*made, *lock.values()]
    phrases: list[str] = []
    for change in changes:
        if isinstance(change, str):
            phrases.append(change.removeprefix("changed ") + " changed")
        else:
            phrases += explain_deps(
                change.get("changed deps", {}), lock[stage], entries, root, f"{data}/code/"
            )
            phrases += explain_outs(change.get("changed outs", {}))
    return phrases


def explain_deps(
    changed: Mapping[str, Any],
    entry: Mapping[str, Any],
    entries: Iterable[Mapping[str, Any]],
    root: Path,
    code: str,
) -> list[str]:
    """Parameters key by key, code file by file, data with the digests that the
    entries of locks know. `code` is the folder of digests of the code."""
    before = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    now = {out["path"]: out.get("md5", "") for other in entries for out in other.get("outs", [])}
    phrases: list[str] = []
    for path, how in changed.items():
        if isinstance(how, dict):
            phrases += explain_params(
                entry.get("params", {}).get(path, {}), params.load(root / path), list(how)
            )
        elif how == "deleted":
            phrases.append(f"input missing: {path}")
        elif how == "new":
            phrases.append(f"{path} is new here")
        elif path.startswith(code):
            phrases += explain_code(path, before.get(path, ""), root)
        elif now.get(path, before.get(path)) != before.get(path):
            phrases.append(f"{path} {before.get(path, '')[:4] or 'new'} -> {now[path][:4]}")
        else:
            phrases.append(f"{path} changed")
    return phrases


def explain_code(path: str, md5: str, root: Path) -> list[str]:
    """The files and the library versions that differ between the digest file `path` and the one of
    the last run, whose digest by DVC is `md5`."""
    return explain_digests(path, md5, read_json(root / path), root)


def explain_digests(path: str, md5: str, now: Mapping[str, Any], root: Path) -> list[str]:
    """As `explain_code`, with what stands in the digest file, or would."""
    before = cached_json(md5, root)
    if before is None:
        return [f"code changed ({path}; the former one is not in DVC's cache)"]
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
    """What happened to a file, from its two digests; nothing where they are equal."""
    if before == now:
        return ""
    return "is new here" if before is None else "is no longer used" if now is None else "changed"


def cached_json(md5: str, root: Path) -> Any:
    """The JSON file of this digest in DVC's cache, or None."""
    for folder in cache_folders(root):
        try:
            return json.loads((folder / "files" / "md5" / md5[:2] / md5[2:]).read_text())
        except (OSError, ValueError):
            continue
    return None


def cache_folders(root: Path) -> Iterator[Path]:
    """Where DVC's cache can stand: where its configuration says, and the usual place."""
    for name in ("config.local", "config"):
        config = configparser.ConfigParser()
        config.read(root / ".dvc" / name)
        if folder := config.get("cache", "dir", fallback=None):
            yield root / ".dvc" / folder
    yield root / ".dvc" / "cache"


def explain_params(
    before: Mapping[str, Any], values: Mapping[str, Any], names: list[str]
) -> list[str]:
    """The parameters under the dotted `names` that differ, as `key before -> after`."""
    return [
        phrase
        for name in names
        for phrase in differences(name, before.get(name, MISSING), find(values, name))
    ]


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
            return "; ".join(kind["said"] for kind in read_sealed(path).values())
    except (OSError, ArtifactError):
        pass  # a remark for people: no stage fails without it
    return ""
