"""What is wrong with values, all of it at once: `params.parse` stops at the first."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError, convert, parse
from tasks.common.spelling import meant

KNOWN = re.compile(
    r"(?P<before>(?P<key>[\w.\[\]]+)|'(?P<quoted>[^']*)') is unknown; [^:]*: (?P<known>.+)"
    r"|is '(?P<value>[^']*)'; (?:there is|allowed|choose from): (?P<values>.+)",
    re.DOTALL,
)


def suggested(message: str) -> str:
    """A message that lists what there is, with the one of them that was probably meant."""
    found = KNOWN.search(message)
    if not found or "did you mean" in message:
        return message
    known = (found["known"] or found["values"]).replace("'", "").split(", ")
    word = found["quoted"] or found["value"] or (found["key"] or "").rpartition(".")[2]
    guess = meant(word, known)
    return f"{message}; did you mean {guess}?" if guess else message


def raised(check: Callable[..., object], *arguments: Any, **named: Any) -> list[str]:
    """What a check that stops at the first problem has to say; nothing where all is well."""
    try:
        check(*arguments, **named)
    except (ParamsError, ArtifactError) as error:
        return [suggested(str(error))]
    return []


def problems(value: Any, hint: Any, where: str) -> list[str]:
    """Everything that keeps `value` from being read as `hint`, a dataclass or another type."""
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return raised(convert, value, hint, where)
    if not isinstance(value, dict):
        return raised(parse, value, hint, where)
    fields, hints = [field.name for field in dataclasses.fields(hint)], typing.get_type_hints(hint)
    found = list(key_problems(value, fields, fields, where))
    for name in fields:
        if name in value:
            found += problems(value[name], hints[name], f"{where}.{name}")
    return found or raised(parse, value, hint, where)  # what the dataclass itself checks


def key_problems(
    value: Mapping[str, Any], allowed: Collection[str], required: Collection[str], where: str
) -> Iterator[str]:
    """Keys that are not allowed, and keys that are missing but for those that were misspelt."""
    misspelt = set()
    for key in value:
        if key not in allowed:
            guess = meant(key, allowed)
            misspelt.add(guess)
            said = f"; did you mean {guess}?" if guess else ""
            yield f"{where}.{key} is unknown; allowed: {', '.join(allowed) or 'no settings'}{said}"
    for key in required:
        if key not in value and key not in misspelt:
            yield f"{where}.{key} is missing; {where} needs: {', '.join(allowed)}"


def bind_problems(
    function: Callable[..., Any], settings: Mapping[str, Any], where: str
) -> list[str]:
    """What keeps `settings` from being the keyword-only arguments of a function."""
    keyword_only = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    required = [n for n, p in keyword_only.items() if p.default is inspect.Parameter.empty]
    found = list(key_problems(settings, list(keyword_only), required, where))
    hints = typing.get_type_hints(function)
    for name in keyword_only:
        if name in settings:
            found += raised(convert, settings[name], hints[name], f"{where}.{name}")
    return found
