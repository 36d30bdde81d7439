"""The options of a multiple-choice question as lines `A. ...`, and the gold as the letter of one
option, or the letters of several correct ones (`ACD`).

Options are a list, a mapping from label to text, a mapping of two lists (`text`, `label`), values
of separate fields, or a text that already contains its letters."""

import json
import re
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from tasks.ingest.candidates import as_text
from tasks.ingest.fields import MISSING, Unusable, decoded
from tasks.ingest.questions.identity import key

# a number needs a blank after it: 1.5 and 1:2 are options
LABEL = re.compile(r"\(?(?P<label>[A-Z])\s*[).:]\s*|\(?(?P<number>\d\d?)[).]\s+")
BETWEEN = re.compile(r"[\s,;&/]+(?:and\s+)?")  # letters of a gold: A, C and D
ROUND_IT = " ().:"  # characters around a letter: (C), C.


@dataclass(frozen=True)
class Options:
    """The `lines` to show; the options' `texts` in letter order, and the source's `labels` in the
    same order (both empty if the source has the options as one text); and whether any option is a
    number rather than text (`has_numbers`)."""

    lines: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    has_numbers: bool = False


def options_of(value: Any) -> Options:
    """Parse the options of a question. Raise Unusable if they are not valid."""
    if isinstance(value, str) and value.strip():
        return Options(value.strip(), (), ())
    if isinstance(value, dict) and {"text", "label"} <= set(value):
        labels, texts = value["label"], value["text"]
    elif isinstance(value, dict):
        present = {label: text for label, text in value.items() if text is not None}
        labels, texts = list(present), list(present.values())
    else:
        labels, texts = None, value
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(ascii_uppercase):
        raise Unusable(f"the options are {shortened(value)}, not a list or mapping of 2 to 26")
    if not all(isinstance(text, str | int | float) for text in texts):
        raise Unusable(f"the options are {shortened(value)}, not all of them text")
    if labels is not None and (not isinstance(labels, list) or len(labels) != len(texts)):
        raise Unusable(f"the options are {shortened(value)}, without a label for each")
    letters = ascii_uppercase[: len(texts)]
    plain, own = unlabelled([as_text(text) for text in texts])
    known = [str(label).strip(ROUND_IT) for label in labels or own or letters]
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, plain, strict=True))
    has_numbers = not all(isinstance(text, str) for text in texts)
    return Options(lines, tuple(plain), tuple(known), has_numbers)


def shortened(value: Any) -> str:
    """Return the first 80 characters of a value in JSON, for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)[:80]


def unlabelled(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts without their labels, and the labels, if each text begins with its own
    letter or number (`B) 6`, `(2) 6`); else the texts, and no labels."""
    found = [LABEL.match(text) for text in texts]
    labels = [label["label"] or label["number"] for label in found if label]
    numbers = [str(number) for number in range(1, len(texts) + 1)]
    if labels not in (list(ascii_uppercase[: len(texts)]), numbers):
        return [text.strip() for text in texts], []
    rest = [text[label.end() :].strip() for text, label in zip(texts, found, strict=True) if label]
    return rest, labels


def shuffled(texts: dict[int, str]) -> dict[int, str]:
    """Return options in an order that depends only on their content, because the source always has
    the correct one in the same field."""
    whole = "\0".join(texts.values())
    return dict(sorted(texts.items(), key=lambda item: key(f"{whole}\0{item[1]}")))


def letters_of(answer: Any, options: Options, first: int | None) -> str | None:
    """Return the gold's letters in alphabetical order; None if any is not an option or is repeated.
    `answer` is one option, a list, or a text with several (`ACD`, `A, C and D`); see `letter`."""
    if isinstance(answer, str):
        if one := letter(answer, options, first):
            return one
        given = decoded(answer)
        parts = BETWEEN.split(answer.strip()) if given is MISSING else given
        answer = list(parts[0]) if parts == [answer.strip()] and answer.isupper() else parts
    if not isinstance(answer, list):
        return letter(answer, options, first)
    found = [letter(one, options, first) for one in answer]
    letters = sorted({one for one in found if one})
    return "".join(letters) if letters and len(letters) == len(answer) else None


def letter(answer: Any, options: Options, first: int | None) -> str | None:
    """Return the letter of the gold, which is a label, a letter, a position or the text of an
    option; None if it is none of them. Positions count from `first`. If that is None, they count
    from 0, and numbers that are labels are not positions. Raise Unusable if two options match."""
    text = as_text(answer).strip()
    letters = ascii_uppercase[: len(options.texts)] or ascii_uppercase
    positions = [str(number + (first or 0)) for number in range(len(letters))]
    place = positions.index(text) if text in positions else None
    if first is not None and place is not None:
        return letters[place]
    name = text.strip(ROUND_IT)
    named = [names.index(name) for names in (options.labels, tuple(letters)) if name in names]
    if named or any(label.isdecimal() for label in options.labels):
        place = named[0] if named else None
    is_text = isinstance(answer, str) or options.has_numbers or not text.isdecimal()
    quoted = options.texts.index(text) if is_text and text in options.texts else place
    if quoted is None or place in (None, quoted):
        return None if quoted is None else letters[quoted]
    raise Unusable(
        f"the answer {answer!r:.80} is the text of option {letters[quoted]} and means option "
        f"{letters[place]}: for positions, set `first_option`"
    )
