"""Any file of rows (JSON Lines, JSON, CSV, Parquet, Arrow): the settings name the fields, by paths
(`reward_model.ground_truth[0]`).

A prompt is a field (text or chat messages), or a text with fields in braces. Answer options go
where the text names them, or at the end, and the gold becomes the letters of the correct ones."""

import re
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from tasks.common.params import ParamsError
from tasks.ingest import answers
from tasks.ingest.answers import Extract, Golds
from tasks.ingest.candidates import MISSING, Candidate, Unusable, as_text, field
from tasks.ingest.fields import filled, paths
from tasks.ingest.files.formats import Record
from tasks.ingest.options import Options, letters_of, options_of, shuffled

NUMBER = re.compile(r"\d+$")  # in the name of a field


@dataclass(frozen=True)
class Settings:
    """`name` is the `source` of the rows. `prompt` is a field, or a text with fields
    (`{Body} {Question}`, `{context?}` if it may be empty); `answer` and `level` (or null) are
    fields.

    Optional: `options` is a field of choices, or a list of fields with one choice each;
    `first_option` is the number of the first choice if golds are positions (default 0); `golds`
    states whether one or all of several golds are required; `tolerance` is the field of the gold's
    tolerance; `extract` takes the gold from a worked solution; `solution` is the field of that
    solution (default if `extract` is set: `answer`); `json` lists fields with JSON text."""

    path: str
    name: str
    prompt: str
    answer: str
    level: str | None
    verifier: str
    options: Any = None
    first_option: int | None = None
    golds: Golds | None = None
    tolerance: str | None = None
    extract: Extract | None = None
    json: list[str] | None = None
    solution: str | None = None


def checked(settings: Settings, where: str) -> Settings:
    """Return the settings. Raise ParamsError if `options` is invalid or conflicts with others."""
    options = settings.options
    names = options if isinstance(options, list) else [options or ""]
    if not all(isinstance(name, str) for name in names):
        raise ParamsError(f"{where}.options is {options!r}; give a field, or a list of fields")
    if options is not None and (settings.golds or settings.tolerance):
        raise ParamsError(
            f"{where} has options and {'golds' if settings.golds else 'tolerance'}: the gold of a "
            "question with options is letters; remove one of the two"
        )
    return settings


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one row, from the named fields."""
    row = record.fields
    level = field(row, settings.level) if settings.level else None
    prompt, answer = prompt_and_gold(row, settings)
    worked = settings.solution or (settings.answer if settings.extract else None)
    solution = field(row, worked) if worked else None
    return Candidate(prompt, answer, settings.verifier, level, solution=solution)


def prompt_and_gold(row: dict[str, Any], settings: Settings) -> tuple[Any, Any]:
    """Return the prompt and the gold of a row. Raise Unusable if either is invalid."""
    answer = value_at(row, settings.answer, settings)
    answer = answers.extracted(answer, settings.extract)
    tolerance = field(row, settings.tolerance) if settings.tolerance else None
    if settings.options is None:
        letters = isinstance(answer, list) and all(str(one).isalpha() for one in answer)
        if settings.verifier == "choice" and letters:
            answer = letters_of(answer, Options("", (), ()), None) or answer
        return prompt_of(row, settings, {}), answers.gold(answer, settings.golds, tolerance)
    options, gold = choices(row, settings, answer)
    prompt = prompt_of(row, settings, {str(settings.options): options.lines})
    if answer is None or answer is MISSING or answer == "":
        return prompt, answer
    if gold is None:
        detail = f"the answer {answer!r:.80} is none of the options {options.lines[:200]!r}"
        if str(answer) == str(len(options.texts)):
            detail += "; if positions count from 1, set `first_option: 1`"
        raise Unusable(detail)
    return prompt, gold


def choices(row: dict[str, Any], settings: Settings, answer: Any) -> tuple[Options, str | None]:
    """Return the options of a row, from one field or from several, and the gold's letters (None if
    it is not an option). Options from several fields are shuffled if the gold is the text of one;
    otherwise they keep their order, because the gold names a field or a position."""
    if isinstance(settings.options, str):
        value = value_at(row, settings.options, settings)
        options = options_of(None if value is MISSING else value)
        return options, letters_of(answer, options, settings.first_option)
    values = [field(row, name) for name in settings.options]
    if MISSING in values:
        raise Unusable(f"one of the fields {', '.join(settings.options)} is missing")
    texts = {place: as_text(one).strip() for place, one in enumerate(values) if one is not None}
    shown = shuffled(texts) if as_text(answer).strip() in texts.values() else texts
    options = options_of(list(shown.values()))
    if settings.answer in settings.options:
        places = [settings.options.index(settings.answer)]
    else:
        places = places_of(answer, values, settings)
    letters = dict(zip(shown, ascii_uppercase, strict=False))
    if not places or not set(places) <= set(letters):
        return options, None
    return options, "".join(sorted(letters[place] for place in places))


def places_of(answer: Any, values: list[Any], settings: Settings) -> list[int]:
    """Return the indices of the gold's options in the list of fields. Raise Unusable if the gold
    can mean either the number in a field's name or a position, unless `first_option` is set."""
    names = settings.options
    texts = tuple("" if value is None else as_text(value).strip() for value in values)
    has_numbers = any(isinstance(value, int | float) for value in values)
    options = Options("", texts, tuple(name.rpartition(".")[2] for name in names), has_numbers)
    first = settings.first_option
    numbers = [NUMBER.search(name) for name in names]
    differ = any(number and int(number[0]) != place for place, number in enumerate(numbers))
    letters = letters_of(answer, options, 0 if first is None and differ else first)
    if first is None and differ and letters != letters_of(answer, options, 1):
        raise Unusable(
            f"the answer {answer!r:.80} can be a number in a field's name or a position: set "
            f"`first_option` to the number that means {names[0]}, 1 or 0"
        )
    return [ascii_uppercase.index(letter) for letter in letters or ""]


def prompt_of(row: dict[str, Any], settings: Settings, lines: dict[str, str]) -> Any:
    """Return the prompt; MISSING if one of its fields is missing, "" if a required one is empty.
    `lines` are the options by field name, appended if the prompt does not name them."""
    named = paths(settings.prompt)
    if not named:
        prompt = value_at(row, settings.prompt, settings)
        if lines and isinstance(prompt, list):
            raise Unusable("the prompt is chat messages, to which no options can be added")
        is_text = isinstance(prompt, str) and prompt.strip()
        return "\n".join([prompt, *lines.values()]) if is_text else prompt
    values = dict(lines)
    for path, may_be_empty in named.items():
        if path in values:
            continue
        value = value_at(row, path, settings)
        if value is MISSING:
            return MISSING
        values[path] = part(value, path)
        if not values[path] and not may_be_empty:
            return ""
    added = [text for path, text in lines.items() if path not in named]
    return "\n".join([filled(settings.prompt, values), *added])


def part(value: Any, path: str) -> str:
    """Return a field's value as text for a prompt. Raise Unusable for a list, dict or boolean."""
    if isinstance(value, list | dict | bool):
        raise Unusable(f"the field {path} of the prompt is {value!r:.80}, neither text nor number")
    return "" if value is None else as_text(value).strip()


def value_at(row: dict[str, Any], path: str, settings: Settings) -> Any:
    """Return a field's value, parsed if `settings.json` lists the field."""
    value = field(row, path)
    return answers.from_json(value, path) if path in (settings.json or ()) else value
