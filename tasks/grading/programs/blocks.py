"""Fenced blocks of a completion (three or more backticks or tildes), found line by line, in time
linear in the text."""

import re
import textwrap
from collections.abc import Collection

FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^`\s]*+)[^`\n]*+")


def last_block(text: str, languages: Collection[str]) -> str | None:
    """Return the last closed block whose language is in `languages`, or None. Languages are in
    lower case; the empty one stands for a fence without a language."""
    last = None
    opened: tuple[str, str] | None = None  # the fence and the language
    lines: list[str] = []
    for line in text.splitlines():
        fence = FENCE.fullmatch(line)
        if opened is None:
            if fence is not None:
                opened = (fence[1], fence[2].lower())
                lines = []
        elif fence is not None and fence[1].startswith(opened[0]) and not fence[2]:
            if opened[1] in languages:
                last = lines
            opened = None
        else:
            lines.append(line)
    return None if last is None else textwrap.dedent("\n".join(last)) + "\n"
