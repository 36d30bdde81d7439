"""Any file of rows (JSON Lines, JSON, CSV, Parquet, Arrow): the settings name the fields, by paths
(`reward_model.ground_truth[0]`).

A prompt is a field (text or chat messages), or a text with fields in braces. Its options are put
where the text names them, else after it, and the gold becomes their letter."""

import re
from dataclasses import dataclass, replace
from typing import Any

from tasks.common.params import ParamsError
from tasks.ingest import answers
from tasks.ingest.answers import Extract, Golds, Unusable
from tasks.ingest.candidates import MISSING, Candidate, Rejection, as_text, field
from tasks.ingest.fields import filled, is_template, may_be_empty, paths
from tasks.ingest.formats import Record
from tasks.ingest.options import Options, letters_of, options_of, shuffled
from tasks.ingest.selection import chosen_verifier, no_verifier, verifier_of

# what a gold may call an option by its field's path: 2 for `option2`, B for `row.B`
DIGITS_AT_END = re.compile(r".*?(\d+)$|.*[.\]]")


@dataclass(frozen=True)
class Settings:
    """`name` is the `source` of the rows. `prompt` is a field, or a text with several of them
    (`{Body} {Question}`, `{context?}` if it may be empty); `answer` and `level` (or null) are
    fields. `verifier` is a name, or the choice by a column.

    May be left out: `options` is a field of choices, or a list of fields that have one each;
    `first_option` is the number of the first one where golds are positions (0);
    `golds` says whether any of a list of golds is right, or only all; `tolerance` is a field;
    `extract` takes the gold from a worked solution; `json` lists fields whose text is JSON."""

    path: str
    name: str
    prompt: str
    answer: str
    level: str | None
    verifier: Any
    options: Any = None
    first_option: int | None = None
    golds: Golds | None = None
    tolerance: str | None = None
    extract: Extract | None = None
    json: list[str] | None = None


def checked(settings: Settings, where: str) -> Settings:
    """Return the settings with `verifier` and `options` read. Raises ParamsError if they cannot
    be."""
    options = settings.options
    names = options if isinstance(options, list) else [options or ""]
    if not all(isinstance(name, str) for name in names):
        raise ParamsError(f"{where}.options is {options!r}; give a field, or a list of fields")
    if options is not None and (settings.golds or settings.tolerance):
        raise ParamsError(
            f"{where} has options and {'golds' if settings.golds else 'tolerance'}: the gold of a "
            "question with options is one letter; remove one of the two"
        )
    return replace(settings, verifier=verifier_of(settings.verifier, f"{where}.verifier"))


def candidate(record: Record, settings: Settings) -> Candidate | Rejection:
    """Return one row by the names of its fields."""
    row = record.fields
    verifier = chosen_verifier(settings.verifier, row)
    if verifier is None:
        detail = no_verifier(settings.verifier, row)
        return Rejection(settings.name, record.line, "no_verifier", detail, record.content)
    level = field(row, settings.level) if settings.level else None
    try:
        prompt, answer = asked_and_gold(row, settings, verifier)
    except Unusable as error:
        return Rejection(settings.name, record.line, "malformed", str(error), record.content)
    return Candidate(settings.name, record.line, record.content, prompt, answer, verifier, level)


def asked_and_gold(row: dict[str, Any], settings: Settings, verifier: str) -> tuple[Any, Any]:
    """Return the prompt and the gold of a row. Raises Unusable with what is wrong with them."""
    answer = value_at(row, settings.answer, settings)
    answer = answers.extracted(answer, settings.extract)
    tolerance = field(row, settings.tolerance) if settings.tolerance else None
    if settings.options is None:
        letters = isinstance(answer, list) and all(str(one).isalpha() for one in answer)
        if verifier == "choice" and letters:
            answer = letters_of(answer, Options("", (), ()), 0) or answer
        return prompt_of(row, settings, {}), answers.gold(answer, settings.golds, tolerance)
    options = choices(row, settings, answer)
    prompt = prompt_of(row, settings, {str(settings.options): options.lines})
    if answer is None or answer is MISSING or answer == "":
        return prompt, answer
    chosen = letters_of(answer, options, settings.first_option or 0)
    if chosen is None:
        detail = f"the answer {answer!r:.80} is none of the options {options.lines[:200]!r}"
        if str(answer) == str(len(options.texts)):
            detail += "; if positions count from 1, set `first_option: 1`"
        raise Unusable(detail)
    return prompt, chosen


def choices(row: dict[str, Any], settings: Settings, answer: Any) -> Options:
    """Return the options of a row, from one field or from several. Those of several fields keep
    their order if the gold is no option's text: then it names a field (`B`, 2 for `option2`) or a
    position."""
    if isinstance(settings.options, str):
        value = value_at(row, settings.options, settings)
    else:
        texts = [field(row, name) for name in settings.options]
        value = [as_text(text).strip() for text in texts if text is not None]
        if any(text is MISSING for text in texts):
            raise Unusable(f"one of the fields {', '.join(settings.options)} is missing")
        if as_text(answer).strip() in value:
            value = shuffled(value)
        else:
            labels = [DIGITS_AT_END.sub(r"\1", name) for name in settings.options]
            value = {"text": value, "label": labels} if len(value) == len(labels) else value
    found = options_of(None if value is MISSING else value)
    if isinstance(found, str):
        raise Unusable(found)
    return found


def prompt_of(row: dict[str, Any], settings: Settings, lines: dict[str, str]) -> Any:
    """Return the prompt. `lines` are the options by the name of their field; they follow the prompt
    if it does not name them."""
    if not is_template(settings.prompt):
        prompt = value_at(row, settings.prompt, settings)
        if lines and isinstance(prompt, list):
            raise Unusable("the prompt is chat messages, to which no options can be added")
        return "\n".join([prompt, *lines.values()]) if is_asked(prompt) else prompt
    values = dict(lines)
    for path in paths(settings.prompt):
        if path in values:
            continue
        value = value_at(row, path, settings)
        if value is MISSING:
            return MISSING
        values[path] = part(value, path)
        if not values[path] and path not in may_be_empty(settings.prompt):
            return ""
    added = [text for path, text in lines.items() if path not in paths(settings.prompt)]
    return "\n".join([filled(settings.prompt, values), *added])


def is_asked(prompt: Any) -> bool:
    """Whether a prompt is text that asks something."""
    return isinstance(prompt, str) and bool(prompt.strip())


def part(value: Any, path: str) -> str:
    """Return a field's value as a part of a prompt."""
    if isinstance(value, list | dict | bool):
        raise Unusable(f"the field {path} of the prompt is {value!r:.80}, neither text nor number")
    return "" if value is None else as_text(value).strip()


def value_at(row: dict[str, Any], path: str, settings: Settings) -> Any:
    """Return the value of a field, decoded if it is one of those whose text is JSON."""
    value = field(row, path)
    return answers.from_json(value, path) if path in (settings.json or ()) else value
