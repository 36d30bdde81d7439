"""The verifiers that an experiment can use, as far as parameters and sources determine them.

The verifier of a prompt is in the prompt's row, which is not available here. But a row copies it
from its source, and a source sets it in the first of these places that exists:

- the entry's own key `verifier`, which replaces every other: a name, or names by a column's values;
- keys `verifier` anywhere in the entry's settings, in the same two forms;
- a verifier's name as a string in the preset's file.

A source with none of these may use any verifier, so all count. For a configured verifier
(`verify.verifiers`), its file counts, and so do the verifiers that its settings name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.common.code import facts, module_file, read

PACKAGE = "tasks.grading.verifiers"


def verifiers_in_use(values: Mapping[str, Any], root: Path) -> list[str]:
    """Return the names of the files in `verifiers/` that can grade a prompt of this experiment."""
    configured = values["verify"]["verifiers"]
    folder = root.joinpath(*PACKAGE.split("."))
    files = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    known = files | set(configured)
    entries = values["ingest"]["sources"]
    pending = [name for entry in entries for name in of_source(entry, known, root)]
    used: set[str] = set()
    while pending:
        name = pending.pop()
        if name in used:
            continue
        used.add(name)
        settings = configured.get(name, {})
        pending += [other for other in texts(settings) if other in known]
    return sorted(used & files)


def of_source(entry: Mapping[str, Any], known: set[str], root: Path) -> set[str]:
    """Return the verifiers that the rows of one entry of `ingest.sources` can name."""
    if entry.get("verifier"):
        return set(names(entry["verifier"], known))
    if set_there := set(under_key(entry.get("settings"), "verifier", known)):
        return set_there
    path = module_file(f"tasks.ingest.sources.{entry.get('preset')}", root)
    return (set(facts(read(path)).strings) & known if path else set()) or known


def under_key(value: Any, key: str, known: set[str]) -> Iterator[str]:
    """Yield every verifier under `key`, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == key:
                yield from names(inner, known)
            else:
                yield from under_key(inner, key, known)
    elif isinstance(value, list):
        for inner in value:
            yield from under_key(inner, key, known)


def names(value: Any, known: set[str]) -> Iterator[str]:
    """Yield `value` if it is a name; if it maps column values to names, yield the known names."""
    if isinstance(value, str):
        yield value
    else:
        yield from (text for text in texts(value) if text in known)


def texts(value: Any) -> Iterator[str]:
    """Yield every string in a value, including the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
