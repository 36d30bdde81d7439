"""Set values in the text of a YAML file; everything else, including comments, stays unchanged.

Left out: ruamel.yaml. It drops the comments after a list that is replaced."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import yaml

from tasks.common.config import changes
from tasks.common.files import temporary_folder
from tasks.common.params import ParamsError, load, parsed


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """Return `text` with the value under each dotted name replaced, or added if it is missing.
    Raise ParamsError if a part of the name is not a mapping, or if the value has a form, such as an
    alias or a block of text, that cannot be replaced."""
    for name, value in values.items():
        text = with_value(text, name, value)
        try:
            is_set = changes.find(parsed(text), name) == value
        except yaml.YAMLError:
            is_set = False
        if not is_set:
            raise ParamsError(f"{name} cannot be set in this file: set it by hand: {inline(value)}")
    return text


def with_value(text: str, name: str, value: Any) -> str:
    """Return `text` with the value under one dotted name replaced or added."""
    node, missing = find(yaml.compose(text, Loader=yaml.SafeLoader), name)
    if missing and isinstance(node, yaml.MappingNode):
        return added(text, node, missing, value)
    for key in reversed(missing):  # of a section without a value
        value = {key: value}
    start, new = node.start_mark.index, written(value, node.start_mark.column)
    if text[start - 1 : start] == ":":  # a key without a value
        new = f" {new}"
    elif text[start : start + 2] == "- " and not new.startswith("- "):
        new = f"  {new}"  # the items of a list may be as far left as its key, other values not
    return text[:start] + new + text[end_of(node) :]


def find(node: Any, name: str) -> tuple[yaml.Node, list[str]]:
    """Return the node of the value under a dotted name, and an empty list. If there is no value,
    return the deepest existing node on the path (a mapping or a null) and the missing keys."""
    keys = name.split(".")
    for number, key in enumerate(keys):
        if node.tag == "tag:yaml.org,2002:null":
            return node, keys[number:]
        if not isinstance(node, yaml.MappingNode):
            where = ".".join(keys[:number])
            raise ParamsError(f"{where} is not a mapping, so {name} cannot be set: edit it by hand")
        found = [value for child, value in node.value if child.value == key]
        if not found:
            return node, keys[number:]
        node = found[0]
    return node, []


def added(text: str, node: yaml.MappingNode, keys: list[str], value: Any) -> str:
    """Return `text` with `value` added to the mapping `node`, nested under `keys`."""
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
    """Return the index just after the text of a value. The text of a block stops after its last
    item, before any comments and blank lines that follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return end_of(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def written(value: Any, column: int) -> str:
    """Return a value as YAML. A list of mappings is a block indented to `column`, one key per line.
    Anything else is one line, with words unquoted if possible."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        indent = "\n" + " " * column
        items = (
            f"{indent}  ".join(f"{key}: {inline(part)}" for key, part in item.items())
            for item in value
        )
        return indent.join(f"- {item}" for item in items)
    return inline(value)


def inline(value: Any) -> str:
    """Return a value as YAML on one line; a large or small float as `3.0e13`."""
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{inline(key)}: {inline(part)}' for key, part in value.items())}}}"
    if isinstance(value, float) and value and not 1e-3 <= abs(value) < 1e6:
        digits, _, exponent = f"{Decimal(repr(value)).normalize():e}".partition("e")
        return f"{digits}{'' if '.' in digits else '.0'}e{int(exponent)}"
    text = json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum()
    return value if plain and parsed(value) == value else text


def overridden(text: str, name: str, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the text of the file `name` and its values after applying overrides KEY=VALUE as
    `dvc exp run -S` does, except that missing keys are added. Comments stay. Raise ParamsError for
    an invalid override. DVC takes a second to import, so it is imported here."""
    from dvc.exceptions import DvcException
    from dvc.utils.hydra import apply_overrides

    with temporary_folder(None, "winnow-overrides") as folder:
        copy = folder / name
        copy.write_text(text)
        try:
            apply_overrides(copy, [forced(override) for override in overrides])
        except DvcException as error:
            raise ParamsError(
                f"{' '.join(overrides)}: {error.__cause__ or error}. An override is KEY=VALUE with "
                f"a key of {name}, as in train.learning_rate=1e-4 or experiment.seeds=[0,1]"
            ) from error
        return copy.read_text(), load(copy)


def forced(override: str) -> str:
    """Return an override that also adds a missing key; `~key` and `+key=value` are unchanged."""
    return override if override.startswith(("+", "~")) else f"++{override}"
