"""The definition of equal prompts, and the hashes by which a million of them are compared and
ordered.

Two rows have the same question if their texts are equal up to Unicode composition, white space, and
full stops and question marks at the end. All other punctuation counts: `z^4 - z^2 + 1` and
`z^4 + z^2 + 1` are two questions. Case counts (`the code of A`, `the code of a`) if the golds
differ, and does not if they agree."""

import hashlib
import json
import unicodedata

from tasks.common.files import digest
from tasks.ingest.candidates import Row

CLOSING = " .?。？"


def prompt_id(row: Row) -> str:
    """Return a digest of the prompt, its answer and its verifier, in 16 hex digits."""
    return digest([row.messages or row.prompt, row.answer, row.verifier])


def normalised(question: str) -> str:
    """Return a question in NFC, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", question).split())


def compared(question: str) -> str:
    """Return the normalised text without full stops or question marks at its end, because a
    template may have added them."""
    text = normalised(question)
    return text.rstrip(CLOSING) or text


def key(text: str) -> int:
    """Return a 64-bit hash of a text. For a million texts, the probability of a collision is one in
    37 million."""
    content = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def place(seed: int, identity: str) -> int:
    """Return a prompt's 64-bit sort key for the assignment to splits. It depends only on the seed
    and the prompt's content, so the order of sources and rows does not matter, and a prompt added
    later moves few others to another split."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{identity}".encode()).digest()[:8], "big")


def question_keys(question: str) -> dict[str, int]:
    """Return the keys of the `compared` question: as is, and case-folded."""
    text = compared(question)
    return {"text": key(text), "folded": key(normalised(text.casefold()))}


def keys(row: Row, identity: str, seed: int) -> dict[str, int]:
    """Return a row's keys for the index: those of its question, its gold and its place. `identity`
    is its prompt_id."""
    return {
        **question_keys(row.question),
        "gold": key(json.dumps([row.answer, row.verifier])),
        "place": place(seed, identity),
    }
