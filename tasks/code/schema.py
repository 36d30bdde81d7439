"""The JSON schema of params.yaml, for editors, from the dataclasses of the sections. The comments
beside their fields are the descriptions."""

import dataclasses
import importlib
import inspect
import re
import types
import typing
from typing import Any

from tasks.code.effective import SECTIONS
from tasks.common import recipes, registry
from tasks.common.params import is_required
from tasks.train.settings import SLOTS

FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
Schema = dict[str, Any]


def schema() -> Schema:
    properties = {name: of_class(cls) for name, cls in SECTIONS.items()}
    known = {"type": "string", "examples": recipes.names({})}  # or another key under `recipes`
    recipe = {"from": known, "allocate": {"type": "object"}, "train": {"type": "object"}}
    properties["recipes"] = {
        "description": "The section `recipes`: your own, each extending another one with `from`.",
        "type": ["object", "null"],
        "additionalProperties": {"type": "object", "properties": recipe},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "params.yaml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": [name for name in SECTIONS if "required" in properties[name]],
    }


def of_class(cls: type) -> Schema:
    sources = [inspect.getsource(each) for each in reversed(cls.__mro__[:-1])]
    comments = {name: text for source in sources for name, text in FIELD.findall(source)}
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    found: Schema = {
        "description": " ".join((cls.__doc__ or "").split()),
        "type": "object",
        "properties": {field.name: of_field(field.name, hints[field.name]) for field in fields},
        "additionalProperties": False,
    }
    for name, part in found["properties"].items():
        part["description"] = comments.get(name, part.get("description", ""))
    if needed := [field.name for field in fields if is_required(field)]:
        found["required"] = needed
    return found


def of_field(name: str, hint: Any) -> Schema:
    if name in SLOTS:
        return of_slot(name)
    return {"type": "array", "items": of_slot(name)} if name == "shape" else of_hint(hint)


def of_slot(name: str) -> Schema:
    """Return the schema of a slot: `method` is one of its methods; other keys are not checked."""
    package = importlib.import_module(f"tasks.train.methods.{name}")
    return {
        "type": "object",
        "properties": {"method": {"type": "string", "enum": registry.names(package)}},
    }


def of_hint(hint: Any) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return of_class(typing.cast(type, hint))
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [of_hint(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": of_hint(arguments[0])}
    if origin is dict:
        return {"type": "object"}
    return {"type": KINDS[hint]} if hint in KINDS else {}
