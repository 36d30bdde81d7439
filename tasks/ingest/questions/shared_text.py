"""Find, from a source's prompts, the instruction that nearly all of them share, so that questions
are compared without it.

It consists of the words at the beginning or end of nearly all prompts of a source, as whole
sentences, such as `Solve the problem step by step.` Words in which the prompts differ are never
part of it. Shared words may also be part of the question, especially in generated problems
(`Calculate 1 + 2`), so a shared text is accepted only if at least half of the prompts have MIN_REST
or more words without it; a shared end contains no question.

It is found from a sample that depends only on the prompts, not on their order. Not supported: texts
in under 95 % of a source's prompts (set its `question`); sources not read from files."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tasks.ingest.candidates import Rejection, Row
from tasks.ingest.questions.identity import key, normalised

SAMPLE = 256  # distinct prompts of a source
MAX_SOURCES = 200  # in memory; further sources are compared unchanged
MIN_PROMPTS = 20  # distinct prompts required to find a shared text
SHARED_RATE = 0.95
MIN_WORDS = 4  # of a shared beginning or end
MIN_REST = 8  # minimum median number of words without the shared text
WORD = re.compile(r"[^\W\d_]+")
ABBREVIATED = re.compile(r"\(?(?:\w\.){2,}|\W*\w\.")  # e.g., i.e., A.
ENDS = (".", ":", "?", "!", "。", "：", "？", "！", "।")  # of a sentence
CLOSES = (*ENDS, "$", "]", ")", "}")  # of a question, which may end with a formula
ASKS = ("?", "？")


@dataclass(frozen=True)
class SharedText:
    """The shared start and end of a source's prompts, with single spaces; either may be empty."""

    start: str
    end: str

    def stripped(self, question: str) -> str:
        """Return a prompt without the shared text; unchanged if it has none or no other words."""
        text = rest = normalised(question)
        if self.start and rest.startswith(self.start + " "):
            rest = rest[len(self.start) + 1 :]
        if self.end and rest.endswith(" " + self.end):
            rest = rest[: -len(self.end) - 1]
        if rest == text or not any(character.isalnum() for character in rest):
            return question
        return rest


class SharedTexts:
    """A sample of the prompts of every source, to which rows are added one at a time."""

    def __init__(self, entries: Iterable[int]) -> None:
        """Sample only the prompts of these `entries` of `ingest.sources`."""
        self.entries = frozenset(entries)
        self.samples: dict[tuple[int, str], Sample] = {}

    def add(self, entry: int, row: Row | Rejection) -> None:
        """Add the prompt of a row to the sample of its entry and source."""
        group = (entry, row.source)
        if isinstance(row, Rejection) or entry not in self.entries:
            return
        if group in self.samples or len(self.samples) < MAX_SOURCES:
            self.samples.setdefault(group, Sample()).add(row.question)

    def shared(self) -> dict[tuple[int, str], SharedText]:
        """Return the text that the prompts of each entry and source share, if any."""
        found = {group: shared_text_of(sample.texts()) for group, sample in self.samples.items()}
        return {group: shared for group, shared in found.items() if shared}


class Sample:
    """A sample of distinct texts: those with the smallest hashes."""

    def __init__(self) -> None:
        self.by_hash: dict[int, str] = {}

    def add(self, text: str) -> None:
        """Add a text. When there are 2 * SAMPLE, keep only the half with the smallest hashes."""
        self.by_hash[key(text)] = text
        if len(self.by_hash) == 2 * SAMPLE:
            self.by_hash = dict(sorted(self.by_hash.items())[:SAMPLE])

    def texts(self) -> list[str]:
        """Return the texts in order of their hashes."""
        return [text for _, text in sorted(self.by_hash.items())[:SAMPLE]]


def shared_text_of(prompts: Sequence[str]) -> SharedText | None:
    """Return the text that a source's prompts share, or None."""
    if len(prompts) < MIN_PROMPTS:
        return None
    words = [normalised(prompt).split(" ") for prompt in prompts]
    start = whole_start(shared(words))
    # the text after the beginning, so that no word counts twice
    rest = [each[len(start) :] if each[: len(start)] == start else each for each in words]
    end = whole_end(shared([each[::-1] for each in rest])[::-1], rest)
    found = SharedText(" ".join(start), " ".join(end))
    if not (start or end):
        return None
    lengths = [num_words(found.stripped(prompt)) for prompt in prompts]
    return found if median(lengths) >= MIN_REST else None


def num_words(text: str) -> int:
    """Return the approximate number of words of a text: ASCII words of two or more letters, and
    half the letters of other words, whose script may have no spaces between words."""
    words = WORD.findall(text)
    return sum(len(word) > 1 if word.isascii() else (len(word) + 1) // 2 for word in words)


def ends(word: str) -> bool:
    """Return whether a word ends a sentence."""
    return word.endswith(ENDS) and not ABBREVIATED.fullmatch(word)


def shared(words: Sequence[Sequence[str]]) -> list[str]:
    """Return the words with which nearly all of the texts begin."""
    needed = math.ceil(SHARED_RATE * len(words))
    common: list[str] = []
    alive = words
    while True:
        place = len(common)
        counts = Counter(each[place] for each in alive if len(each) > place)
        word, number = counts.most_common(1)[0] if counts else ("", 0)
        if number < needed:
            return common
        common.append(word)
        alive = [each for each in alive if len(each) > place and each[place] == word]


def whole_start(words: list[str]) -> list[str]:
    """Return the whole sentences in a shared start, or [] for fewer than MIN_WORDS words."""
    length = max((place for place, word in enumerate(words, 1) if ends(word)), default=0)
    return words[:length] if num_words(" ".join(words[:length])) >= MIN_WORDS else []


def whole_end(words: list[str], prompts: Sequence[Sequence[str]]) -> list[str]:
    """Return the whole sentences of the shared end `words` after its last question. `words` starts
    a sentence if, in at least half of the prompts, the word before it ends with one of CLOSES."""
    before = [each[-len(words) - 1] for each in prompts if len(each) > len(words)]
    closed = 2 * sum(word.endswith(CLOSES) for word in before) >= len(before)
    starts = [0] * closed + [n for n, word in enumerate(words, 1) if ends(word)]
    asks = [n for n, word in enumerate(words, 1) if word.endswith(ASKS)]
    first = next((n for n in starts if n >= max(asks, default=0)), len(words))
    return words[first:] if num_words(" ".join(words[first:])) >= MIN_WORDS else []
