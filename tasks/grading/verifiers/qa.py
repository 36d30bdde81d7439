"""`qa`: a short answer in words, by SQuAD's exact match and F1 (arXiv 1606.05250).

Answer and gold are lower-cased and stripped of ASCII punctuation, articles and surplus white space.
The gold is one text, or a JSON list of several: the best match counts. F1, the score, counts the
words that answer and gold share, with repetitions. The answer is the part marked by tags or a box,
else the whole completion; to judge only the text after the reasoning, use a `part`. Not supported:
languages without spaces between words, number words, synonyms."""

import json
import re
import string
from collections import Counter
from functools import lru_cache

from tasks.grading.answers.marked import marked_answer
from tasks.grading.verdict import Verdict

ANSWERS = True
FORMS = ("any",)
EXAMPLE = "qa: {method: qa, threshold: null}  # null: exact match; or the F1 that is correct"
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def verify(completion: str, answer: str, *, threshold: float | None) -> Verdict:
    """Return `correct` for an exact match, or for an F1 of at least `threshold` if set; else
    `wrong`, or `unparsed` for an empty answer. An empty list of golds is an `error`."""
    golds = read_golds(answer)
    given = marked_answer(completion)
    if not given:
        return Verdict("unparsed", "")
    words = normalize(given)
    score = max(f1(words, gold) for gold in golds)
    correct = words in golds if threshold is None else score >= threshold
    return Verdict("correct" if correct else "wrong", given, score)


def canonical_completion(answer: str) -> str:
    """Return the first gold in `<answer>` tags."""
    return f"<answer>{texts(answer)[0]}</answer>"


@lru_cache(maxsize=1024)
def read_golds(answer: str) -> tuple[tuple[str, ...], ...]:
    """Return the words of every gold. Raise ValueError if there is none."""
    return tuple(normalize(text) for text in texts(answer))


def texts(answer: str) -> list[str]:
    """Return the golds: the texts of a JSON list or of `{"any": [...]}`, or the single text."""
    try:
        golds = json.loads(answer)
    except ValueError:
        return [answer]
    golds = golds.get("any") if isinstance(golds, dict) else golds
    if not isinstance(golds, list):
        return [answer]
    if not golds or not all(isinstance(gold, str) and gold.strip() for gold in golds):
        raise ValueError(f"the golds {answer[:80]!r} are not a list of texts")
    return golds


def normalize(text: str) -> tuple[str, ...]:
    """Return the words to compare."""
    return tuple(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(given: tuple[str, ...], gold: tuple[str, ...]) -> float:
    """Return the harmonic mean of the precision and recall of words; 1 if both sides are empty, 0
    if only one is."""
    if not given or not gold:
        return float(given == gold)
    shared = (Counter(given) & Counter(gold)).total()
    return 2 * shared / (len(given) + len(gold))
