"""New values in the text of a YAML file, everything else left as it is, comments included."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from tasks.common.params import ParamsError


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """`text` with the value under each dotted name replaced, or added where there is none. Raises
    ParamsError where a part of the name is no mapping."""
    for name, value in values.items():
        node, missing = find(yaml.compose(text, Loader=yaml.SafeLoader), name)
        if missing:
            text = added(text, node, missing, value)
            continue
        start, end = node.start_mark.index, end_of(node)
        space = " " if text[start - 1 : start] == ":" else ""  # after a key without a value
        text = text[:start] + space + written(value, node.start_mark.column) + text[end:]
    return text


def find(node: Any, name: str) -> tuple[yaml.Node, list[str]]:
    """The node of the value under a dotted name; where it is missing, the last mapping on the way
    to it and the keys that this lacks."""
    keys = name.split(".")
    for number, key in enumerate(keys):
        if not isinstance(node, yaml.MappingNode):
            where = ".".join(keys[:number])
            raise ParamsError(f"{where} is no mapping, so {name} cannot be set: write it by hand")
        found = [value for child, value in node.value if child.value == key]
        if not found:
            return node, keys[number:]
        node = found[0]
    return node, []


def added(text: str, node: yaml.MappingNode, keys: list[str], value: Any) -> str:
    """`text` with a key at the end of a mapping, and its value under the further keys."""
    key, *inner = keys
    for name in reversed(inner):
        value = {name: value}
    if node.flow_style:
        place, before = node.end_mark.index - 1, ", " if node.value else ""
        return text[:place] + f"{before}{key}: {inline(value)}" + text[place:]
    column = node.start_mark.column
    place = text.find("\n", end_of(node))  # after a comment on the last line
    place = len(text) if place < 0 else place
    line = f"{' ' * column}{key}: {written(value, column + 2)}"
    return f"{text[:place]}\n{line}{text[place:]}"


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
