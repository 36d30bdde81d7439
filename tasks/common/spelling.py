"""What was probably meant by a name that is not known."""

import difflib
from collections.abc import Iterable


def meant(word: object, known: Iterable[object]) -> str | None:
    """The one of `known` that is most like `word`, if one is."""
    close = difflib.get_close_matches(str(word), [str(name) for name in known], 1)
    return close[0] if close else None
