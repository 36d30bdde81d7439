"""Training prompts that are also in the evaluation: the same question, or nearly the same words.

Exact: the same question (see `identity`), ignoring case. Near: the longer prompt contains at least
a given share of the shorter prompt's word n-grams, and nearly all of its content words (see
`similarity`). Three more rules separate different problems and keep the search fast:

- Text that many prompts of either side share (an instruction, a template) is not evidence: n-grams
  and words in over 1 % (and over 20) of a sample's prompts do not count.
- With `same_numbers`, two prompts are near only if their numbers, operators and variables agree in
  order, except in whole sentences that only the longer prompt has before or after the shared ones.
  So neither `12 + 3` and `12 + 4`, nor `z^4 - z^2 + 1` and `z^4 + z^2 + 1`, match.
- An index lists the evaluation's prompts by n-gram, so the search is exact, and linear in the
  training prompts. Only pairs with the given share are compared by numbers and words.

Not supported: paraphrases in other words, translations."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tasks.common.progress import progress
from tasks.ingest.questions.similarity import same, text_of, tokens_of, words_of
from tasks.ingest.settings import Contamination
from tasks.ingest.spool import Spool

SAMPLE = 10_000  # prompts of each side in which shared n-grams are counted
# an n-gram or a word is shared if it is in more prompts of the sample than both limits: a share
# and a number
SHARED_RATE = 0.01
MIN_SHARED = 20
FACTOR = 0x9E3779B97F4A7C15  # odd; its powers weight the tokens of an n-gram by position
Hashes = NDArray[np.uint64]
PAIRS = {"row": pl.UInt32, "other": pl.UInt32, "kind": pl.String, "overlap": pl.Float64}


def pairs(
    spool: Spool, train: pl.DataFrame, evaluation: pl.DataFrame, settings: Contamination
) -> pl.DataFrame:
    """Return the PAIRS of training and evaluation rows (parts of the index) with the same question
    or, unless `overlap` is None, nearly the same words."""
    found = exact(train, evaluation)
    if settings.overlap is None:
        return found
    rest = train.join(found, on="row", how="anti", maintain_order="left")
    return pl.concat([found, near(spool, rest["row"], evaluation["row"], settings)])


def exact(train: pl.DataFrame, evaluation: pl.DataFrame) -> pl.DataFrame:
    """Return the pairs whose questions are equal except for case."""
    others = evaluation.select("folded", other="row")
    return train.join(others, on="folded", maintain_order="left_right").select(
        "row", "other", kind=pl.lit("exact"), overlap=pl.lit(1.0)
    )


def near(
    spool: Spool, train: pl.Series, evaluation: pl.Series, settings: Contamination
) -> pl.DataFrame:
    """Return the PAIRS of `train` and `evaluation` (row numbers) with nearly the same words."""
    questions = spool.take(evaluation, "question")
    sample = spool.take(train.head(SAMPLE), "question")
    here = shared(sample["question"], settings.ngram)
    there = shared(questions["question"].head(SAMPLE), settings.ngram)
    common = Common(np.union1d(here.grams, there.grams), here.words | there.words)
    index = Index(zip(questions["row"], questions["question"], strict=True), common, settings)
    near_rows: list[tuple[int, int, str, float]] = []
    with progress(len(train), "contamination", "prompt") as bar:
        for part in spool.ordered(train, "question"):
            for row, question in zip(part["row"], part["question"], strict=True):
                hits = index.search(question)
                near_rows += [(row, other, "near", overlap) for other, overlap in hits]
                bar.update()
    return pl.DataFrame(near_rows, schema=PAIRS, orient="row")


@dataclass(frozen=True)
class Common:
    """Features that many prompts share: the sorted hashes of n-grams, and the words."""

    grams: Hashes
    words: frozenset[str]


class Index:
    """An index of the evaluation's prompts, to find those that overlap with a given prompt."""

    def __init__(
        self, prompts: Iterable[tuple[int, str]], common: Common, settings: Contamination
    ) -> None:
        self.settings = settings
        self.common = common
        self.threshold = settings.overlap or 1.0
        self.prompts = list(prompts)
        grams = [self.distinct(question) for _, question in self.prompts]
        self.sizes = np.array([len(each) for each in grams], dtype=np.int64)
        # every n-gram with the index of its prompt, sorted by n-gram
        flat = np.concatenate([*grams, np.zeros(0, np.uint64)])
        order = np.argsort(flat, kind="stable")
        self.grams = flat[order]
        self.places = np.repeat(np.arange(len(grams), dtype=np.int32), self.sizes)[order]

    def search(self, question: str) -> Iterator[tuple[int, float]]:
        """Yield the rows and overlaps of the prompts near `question`, in the order of the index."""
        grams = self.distinct(question)
        starts = np.searchsorted(self.grams, grams, "left")
        ends = np.searchsorted(self.grams, grams, "right")
        hits = [
            self.places[start:end] for start, end in zip(starts, ends, strict=True) if start < end
        ]
        if not hits:
            return
        places, counts = np.unique(np.concatenate(hits), return_counts=True)
        overlaps = counts / np.minimum(len(grams), self.sizes[places])
        near = overlaps >= self.threshold
        text = text_of(question) if near.any() else None
        for place, overlap in zip(places[near], overlaps[near], strict=True):
            row, other = self.prompts[place]
            if text is not None and same(
                text, text_of(other), self.common.words, self.settings.same_numbers
            ):
                yield row, float(overlap)

    def distinct(self, question: str) -> Hashes:
        """Return the n-grams of a prompt without the common ones."""
        grams = ngrams(tokens_of(question), self.settings.ngram)
        return np.setdiff1d(grams, self.common.grams, True)


def shared(sample: Iterable[str], size: int) -> Common:
    """Return the n-grams and words that many prompts of a sample share."""
    grams: Counter[int] = Counter()
    words: Counter[str] = Counter()
    num_prompts = 0
    for question in sample:
        tokens = tokens_of(question)
        grams.update(ngrams(tokens, size).tolist())
        words.update(words_of(tokens))
        num_prompts += 1
    limit = max(MIN_SHARED, SHARED_RATE * num_prompts)
    return Common(
        np.array(sorted(gram for gram, count in grams.items() if count > limit), np.uint64),
        frozenset(word for word, count in words.items() if count > limit),
    )


def ngrams(tokens: list[str], size: int) -> Hashes:
    """Return the distinct hashes of all runs of `size` tokens; a shorter prompt is a single run."""
    codes = np.array([zlib.crc32(token.encode()) for token in tokens], np.uint64)
    runs = np.zeros(max(len(codes) - size + 1, min(len(codes), 1)), np.uint64)
    for place in range(min(size, len(codes))):
        runs = runs * np.uint64(FACTOR) + codes[place : place + len(runs)]
    return np.unique(runs)
