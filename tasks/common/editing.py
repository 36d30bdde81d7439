"""New values in the text of a YAML file, everything else left as it is, comments included."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from tasks.common.params import ParamsError


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """`text` with the value under each dotted name replaced. Raises ParamsError for a name that it
    does not have."""
    for name, value in values.items():
        node = find(yaml.compose(text, Loader=yaml.SafeLoader), name)
        start, end = node.start_mark.index, end_of(node)
        space = " " if text[start - 1 : start] == ":" else ""  # after a key without a value
        text = text[:start] + space + written(value, node.start_mark.column) + text[end:]
    return text


def find(node: Any, name: str) -> yaml.Node:
    """The node of the value under a dotted name."""
    for key in name.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [value for child, value in pairs if child.value == key]
        if not found:
            raise ParamsError(f"the file has no key {name}: write it by hand")
        node = found[0]
    return node  # type: ignore[no-any-return]


def end_of(node: yaml.Node) -> int:
    """Where the text of a value ends: that of a block ends with its last part, before the comments
    and blank lines that follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return end_of(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def written(value: Any, column: int) -> str:
    """A value as YAML: a list of mappings as a block at this column, a key a line, all else in one
    line. JSON is YAML, but for words, which stand plain where they can."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        indent = "\n" + " " * column
        items = (
            f"{indent}  ".join(f"{key}: {inline(part)}" for key, part in item.items())
            for item in value
        )
        return indent.join(f"- {item}" for item in items)
    return inline(value)


def inline(value: Any) -> str:
    """A value in one line."""
    text = json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum()
    return value if plain and yaml.safe_load(value) == value else text
