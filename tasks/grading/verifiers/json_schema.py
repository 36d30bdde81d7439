"""`json_schema`: the completion is JSON that conforms to a schema, as judged by jsonschema (MIT).

The schema is the gold or a setting; its `$schema` names the draft, 2020-12 by default. The JSON is
the last fenced block (```json or no language), or the whole completion if there is no block and
`place` allows it. A `$ref` is resolved within the schema and the drafts' own schemas, never over a
network. NaN and Infinity are not JSON. Not checked: `format`, which the drafts do not assert
either."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NoReturn

from jsonschema import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from jsonschema_specifications import REGISTRY

from tasks.common.params import ParamsError
from tasks.grading.programs.blocks import last_block
from tasks.grading.verdict import Verdict

LIBRARIES = ("jsonschema", "referencing")
canonical_completion = None  # a schema is not a value that satisfies it

LANGUAGES = ("", "json")
NESTED = 50  # brackets of a value whose check may recurse too deep


def ready(settings: Mapping[str, Any]) -> None:
    """Raise ParamsError for an invalid schema in the settings."""
    if settings["schema"] is not None:
        try:
            validator(json.dumps(settings["schema"]))
        except SchemaError as error:
            raise ParamsError(f"`schema` is not a JSON schema: {error.message}") from error


def verify(
    completion: str,
    answer: str,
    *,
    schema: dict[str, Any] | None,
    place: Literal["block", "whole", "either"],
) -> Verdict:
    """Return `correct`, or `wrong` with the path of the first violation of the schema; `unparsed`
    for text that is not JSON. An invalid schema in the gold is an `error`; with the setting
    `schema` the gold is ignored."""
    checked = validator(answer if schema is None else json.dumps(schema))
    checked.is_valid(None)  # raises for an endless `$ref` of the whole value
    text = find(completion, place)
    try:
        value = json.loads(text, parse_constant=refuse)
        problem = next(iter(checked.iter_errors(value)), None)
    except (ValueError, OverflowError, RecursionError) as error:  # OverflowError: a large number
        if isinstance(error, RecursionError) and text.count("{") + text.count("[") < NESTED:
            raise  # because of an endless `$ref` of the schema
        return Verdict("unparsed", text.strip())
    if problem is None:
        return Verdict("correct", text.strip())
    return Verdict("wrong", f"{problem.json_path}: {problem.message}")


@lru_cache(maxsize=256)
def validator(schema: str) -> Validator:
    """Return the (cached) validator of a schema in JSON. Raise SchemaError for an invalid schema,
    ValueError for text that is not JSON or is neither an object nor a boolean."""
    content = json.loads(schema)
    if not isinstance(content, dict | bool):
        raise ValueError(f"a schema is an object, not {type(content).__name__}")
    kind = validator_for(content, default=Draft202012Validator)
    kind.check_schema(content)
    return kind(content, registry=REGISTRY)


def find(completion: str, place: str) -> str:
    """Return the text that should be JSON; an empty string if there is none."""
    block = None if place == "whole" else last_block(completion, LANGUAGES)
    if block is None:
        return "" if place == "block" else completion
    return block


def refuse(constant: str) -> NoReturn:
    """Raise ValueError for NaN, Infinity and -Infinity."""
    raise ValueError(f"{constant} is not JSON")
