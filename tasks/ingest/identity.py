"""What makes two prompts the same, and the numbers by which a million of them are compared and put
in order.

Two rows ask the same question when their texts are equal up to Unicode composition and white space.
Punctuation counts: `z^4 - z^2 + 1` and `z^4 + z^2 + 1` are two questions. Upper and lower case
count too (`the code of A`, `the code of a`) where the golds differ, and do not where they agree.
"""

import hashlib
import json
import unicodedata

from tasks.common.files import digest
from tasks.ingest.candidates import Row


def prompt_id(row: Row) -> str:
    """16 hex digits of what is asked and how it is judged."""
    return digest([row.messages or row.prompt, row.answer, row.verifier])


def normalised(asked: str) -> str:
    """The text by which prompts are compared."""
    return " ".join(unicodedata.normalize("NFC", asked).split())


def key(text: str) -> int:
    """64 bits of a text. Among a million texts two unequal ones share it once in 37 million
    trials."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def place(seed: int, identity: str) -> int:
    """A prompt's place in the order of the splits: set by the seed and by its own content, so that
    neither the order of the sources nor of their rows matters, and a prompt that is added later
    shifts few others."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{identity}".encode()).digest()[:8], "big")


def keys(row: Row, seed: int) -> dict[str, int]:
    """The columns of the index by which a row is compared: its question, the same without case, its
    gold, its place."""
    text = normalised(row.asked)
    return {
        "text": key(text),
        "folded": key(normalised(text.casefold())),
        "gold": key(json.dumps([row.answer, row.verifier])),
        "place": place(seed, prompt_id(row)),
    }
