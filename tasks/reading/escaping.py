"""Text that a model wrote, made fit for a terminal: it may hold what moves the cursor, changes
colours or the title, or turns the direction of writing."""

import unicodedata

KEPT = "\n\t"


def escaped(text: str) -> str:
    """The text with every character that is not to be seen as its escape: `\\x1b`, `\\u202e`."""
    return "".join(
        c if c in KEPT or is_visible(c) else c.encode("unicode_escape").decode() for c in text
    )


def is_visible(character: str) -> bool:
    """Whether a character only shows itself. Spaces other than U+0020 are no printable characters
    to Python, and harmless."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
