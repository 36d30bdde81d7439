"""The nodes of a YAML file, tags included. Nothing is constructed, so no tag runs any code."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import yaml

from tasks.common.files import ArtifactError

STANDARD = "tag:yaml.org,2002:"
MAX_DEPTH = 100  # an alias can be inside its own anchor, ...
MAX_ENTRIES = 100_000  # ... and few lines of aliases can expand to billions of values


@dataclass(frozen=True)
class Entry:
    """One scalar of a file: its text, the keys above it, its line, and its tag unless that is one
    of YAML's own."""

    keys: tuple[str, ...]
    text: str
    line: int
    tag: str | None


def entries(path: Path) -> list[Entry]:
    """Return every scalar, and every mapping or list with its own tag (as an entry without text).
    Raise ArtifactError if the file is not YAML or has more than MAX_ENTRIES values."""
    try:
        node = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
        found = [] if node is None else list(islice(walk(node, (), 0), MAX_ENTRIES + 1))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is not YAML: {error}") from error
    if len(found) > MAX_ENTRIES:
        raise ArtifactError(f"{path} has more than {MAX_ENTRIES} values: its aliases multiply")
    return found


def walk(node: yaml.Node, keys: tuple[str, ...], depth: int) -> Iterator[Entry]:
    """Yield the entries of a node, in the file's order."""
    if depth > MAX_DEPTH:
        raise RecursionError(f"nested more than {MAX_DEPTH} times")
    line, tag = node.start_mark.line + 1, own_tag(node)
    if isinstance(node, yaml.ScalarNode):
        yield Entry(keys, node.value, line, tag)
        return
    if tag:
        yield Entry(keys, "", line, tag)
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from walk(child, keys, depth + 1)
    elif isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            yield from walk(child, (*keys, str(key.value)), depth + 1)


def own_tag(node: yaml.Node) -> str | None:
    """Return the tag of a node, or None for YAML's own tags (Python's are not YAML's own)."""
    tag = str(node.tag)
    is_standard = tag.startswith(STANDARD) and not tag.startswith(f"{STANDARD}python")
    return None if is_standard else tag.removeprefix(STANDARD)
