"""Decide whether two prompts that share most of their n-grams are the same problem, by their
content words and their questions.

Text and LaTeX are first normalised: `\\dfrac{1}{2}` is `1/2`, `2{,}400.0` is `2400`, `twelve` is
`12`. Text around the question is removed (`surroundings`). Each of these rules then rejects pairs
that the others accept:

- The numbers, operators and variables of one prompt equal those of the other, in the same order.
  The longer prompt may have more of them in sentences before or after the shared sentences, and
  may give the value of a variable at its end (`when n = 9`).
- If both have figures or options, these have the same numbers and words.
- The prompt with fewer content words shares nearly all of them with the other. Content words are
  neither stop words nor words that many prompts of a sample have, so that templates
  (`arrange the letters of the word ...`) are distinguished by their variable part.
- If the prompts share few content words, only one prompt may have others, at most MAX_MORE.
- The question sentences (see `asks`) share most of their words: the area and the perimeter of one
  rectangle are two problems.
- No decisive word (`exactly`, `first`, `same`) replaces another; in the question sentences no
  variable replaces another, and the negations agree.

Not supported: synonyms, renamed variables, stop words of languages other than English. In
scripts without spaces between words, whole phrases are compared."""

import re
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache

from tasks.ingest.questions.identity import normalised
from tasks.ingest.questions.surroundings import PARAGRAPH, SPECIAL_CASE, parts, sentences

MIN_CONTENT = 0.85  # of the content words of the prompt that has fewer
MIN_ASKING = 0.7  # likewise, of the words in the question sentences
MIN_WORDS = 4  # shared content words; with fewer, only one prompt may have others, up to MAX_MORE
MAX_MORE = 2
TOKEN = re.compile(r"[^\W\d_]+|\d+(?:\.\d+)?|\.\d+|[^\w\s]")
NUMBER = re.compile(r"[\d.]*\d|[-+*/^=<>≤≥±÷|]")
VARIABLE = re.compile(
    r"[^\W\d_]|alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|(?:var)?phi|psi|omega"
)
WORD = re.compile(r"[^\W\d_]+")
COLON = re.compile(r"(?<=:)\s+")
BLANK_LINE = re.compile(r"\n\s*\n")
SILENT = frozenset(PARAGRAPH + ".,;:?!\"'`´‘’“”„«»$\\{}#&~…。，；：？！、")
ORDER = re.compile(
    r"\b(?:find|compute|calculate|determine|evaluate|simplify|solve|convert|factor|expand|prove|"
    r"spell)\b"
)
REWRITTEN = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\\[()\[\]]", " "),
        (r"\*\*(?=\S)([^*]+)(?<=\S)\*\*", r"\1"),
        (r"\\(?:left|right|displaystyle|big|bigl|bigr|limits|q?quad)(?![a-z])", " "),
        (
            r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|operatorname|mbox)\s*\{([^{}]*)\}",
            r" \1 ",
        ),
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\\[dt]?frac\s*(\d)\s*(\d)", r"\1/\2"),
        (r"\\[dt]binom", r"\\binom"),
        (r"\^\s*\{?\s*\\circ\s*\}?|°", " degrees "),
        (r"\\(?:cdot|times)(?![a-z])|[×·∙⋅]", "*"),
        (r"\\leq?(?:slant)?(?![a-z])|<=", "≤"),
        (r"\\geq?(?:slant)?(?![a-z])|>=", "≥"),
        (r"\\div(?![a-z])", "÷"),
        (r"\\pm(?![a-z])", "±"),
        (r"\\[lr]vert(?![a-z])", "|"),
        (r"\\[,;:!>]", ""),
        ("\N{MINUS SIGN}", "-"),
        (r"\$(?=-)|(?<=-)\$", ""),
        # the hyphen of a word (x-axis), not the minus of a formula (x-y)
        (r"(?<=[^\W\d_]{2})-(?=[^\W\d_])|(?<=[^\W\d_])-(?=[^\W\d_]{2})", " "),
    )
]
MARKED = re.compile(r"[\\*×·∙⋅°<>\N{MINUS SIGN}-]")  # without one of these, nothing is rewritten
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|,)(?=\d{3}(?!\d))")
ZEROS = re.compile(r"(?<=\d)\.(?:0++(?!\d)|(?P<kept>\d*[1-9])0++(?!\d))")
# "one" is excluded: it is a pronoun as often as a number
VALUES = {
    word: str(value)
    for value, word in enumerate(
        WORD.findall("two three four five six seven eight nine ten eleven twelve"), 2
    )
}
SAME = {"greatest": "largest", "biggest": "largest"}
DECISIVE = frozenset(
    WORD.findall(
        """
        all any both least most exactly more less fewer greater larger smaller largest smallest
        maximum minimum highest lowest first second third fourth fifth last half quarter twice
        double triple same different even odd positive negative before after
        """
    )
)
NEGATIONS = frozenset(
    WORD.findall("not no neither nor none never without except consecutive replacement")
)
NEGATING = ("in", "un", "non", "im")
STOP = frozenset(
    WORD.findall(
        """
        a about after all also am an and any are as at be been before between but by can could
        did do does each every for from given had has have he her here hers him his how i if in
        into is it its just let may me more most much many must my no nor not now of off on once
        one only or other our out over per s she should so some such t than that the their them
        then there these they this those to too under until up upon us was we were what when
        where whether which while who whom whose why will with would you your answer calculate
        compute determine evaluate exact exactly exercise express expression final find
        following give leave possible problem question show simplify solution solve step suppose
        task think use using value write please put within boxed box reason reasoning carefully
        output provide enter response respond
        """
    )
)


@dataclass(frozen=True)
class Text:
    """A prompt in comparable form: its question; the tokens of its figures and options; the
    question's tokens, numbers (with operators and variables) and content words; and the counts of
    the words in the question sentences and of the decisive words."""

    question: str
    attached: list[str]
    tokens: frozenset[str]
    numbers: list[str]
    content: frozenset[str]
    asking: Counter[str]
    decisive: Counter[str]


@lru_cache(maxsize=4096)
def text_of(prompt: str) -> Text:
    """Convert a prompt to the form in which prompts are compared."""
    return text_from(*parts(rewritten(prompt)))


def text_from(question: str, attached: str) -> Text:
    """Convert a question and its attachments to the form in which prompts are compared."""
    words = words_of(WORD.findall(question))
    tokens = tokens_in(question)
    asking = " ".join(asks(question) or sentences(question)[-1:])
    return Text(
        question=question,
        attached=tokens_in(attached),
        tokens=frozenset(tokens),
        numbers=numbers_of(tokens),
        content=frozenset(words) - STOP,
        asking=Counter(words_of(WORD.findall(asking))),
        decisive=Counter(word for word in words if word in DECISIVE),
    )


def tokens_of(prompt: str) -> list[str]:
    """Return the words, numbers and signs of a prompt's question, without ignored signs."""
    return tokens_in(parts(rewritten(prompt))[0])


def tokens_in(text: str) -> list[str]:
    """Return the tokens of a rewritten text."""
    return [VALUES.get(token, token) for token in TOKEN.findall(text) if token not in SILENT]


def numbers_of(tokens: list[str]) -> list[str]:
    """Return the tokens that are numbers, operators, or variables in formulas. A letter between
    words (`let x and y be real`) is not in a formula."""
    beside = [*map(str.isalpha, tokens), True]
    return [
        token
        for place, token in enumerate(tokens)
        if NUMBER.fullmatch(token)
        or (VARIABLE.fullmatch(token) and not (beside[place - 1] and beside[place + 1]))
    ]


def same(one: Text, other: Text, common: Set[str], same_numbers: bool) -> bool:
    """Return whether two prompts are the same problem, or the shorter one is part of the longer
    one. `common` are words that many prompts have."""
    if one.attached and other.attached and not same_attached(one.attached, other.attached):
        return False
    if len(one.question) > len(other.question):
        one, other = other, one
    return any(
        (not same_numbers or one.numbers == part.numbers) and alike(one, part, common)
        for part in wholes(one, other)
    )


def wholes(one: Text, other: Text) -> Iterator[Text]:
    """Yield the longer prompt `other`, then its parts: without the text around sentences shared
    with `one` (if `one` has numbers), without a variable's value at the end, and without both."""
    yield other
    core = shared_part(other.question, one.tokens) if one.numbers else ""
    general = (SPECIAL_CASE.sub("", text) for text in (core, other.question))
    for part in dict.fromkeys((core, *general)):
        if part and part != other.question:
            # the question sentence may be in the removed text
            text = text_from(part, "")
            yield text if asks(part) else replace(text, asking=other.asking)


def shared_part(text: str, tokens: Set[str]) -> str:
    """Return the part of `text` from the first to the last sentence in which most tokens are in
    `tokens`. Text before a colon counts as a sentence here."""
    found = [part for each in sentences(text) for part in COLON.split(each)]
    is_shared = [
        sum(token in tokens for token in own) >= MIN_ASKING * len(own)
        for own in map(tokens_in, found)
    ]
    if not any(is_shared):
        return ""
    return " ".join(found[is_shared.index(True) : len(found) - is_shared[::-1].index(True)])


def words_of(tokens: list[str]) -> list[str]:
    """Return the tokens that are words, except number words. Synonyms in SAME become one word."""
    return [SAME.get(token, token) for token in tokens if token.isalpha() and token not in VALUES]


def rewritten(prompt: str) -> str:
    """Return the text in lower case, with LaTeX and numbers normalised."""
    prompt = BLANK_LINE.sub(f" {PARAGRAPH} ", prompt.strip())
    text = THOUSANDS.sub("", normalised(prompt).casefold())
    if MARKED.search(text):
        for pattern, replacement in REWRITTEN:
            text = pattern.sub(replacement, text)
    return ZEROS.sub(lambda found: f".{found['kept']}" if found["kept"] else "", text)


def asks(text: str) -> list[str]:
    """Return the sentences with a question mark, else the sentences with an imperative."""
    found = sentences(text)
    asking = [each for each in found if "?" in each or "？" in each]
    return asking or [each for each in found if ORDER.search(each)]


def alike(one: Text, other: Text, common: Set[str]) -> bool:
    """Return whether two prompts are the same problem, judged by their words; `common` are words
    that many prompts have."""
    if len(one.content & other.content) < MIN_WORDS:
        more, fewer = one.content - other.content, other.content - one.content
        return len(more | fewer) <= MAX_MORE and not (more and fewer) and not opposed(one, other)
    return (
        contained(one.content - common, other.content - common, MIN_CONTENT)
        and contained(asking_words(one), asking_words(other), MIN_ASKING)
        and not opposed(one, other)
    )


def same_attached(one: list[str], other: list[str]) -> bool:
    """Return whether figures or options are the same: the numbers of one are consecutive numbers of
    the other, and nearly all words of the smaller set are in the larger one."""
    mine, yours = (f" {' '.join(numbers_of(tokens))} " for tokens in (one, other))
    words = (set(words_of(one)), set(words_of(other)))
    return (mine in yours or yours in mine) and contained(*words, MIN_CONTENT)


def asking_words(text: Text) -> set[str]:
    """Return the question sentences' content words, without variables."""
    return {word for word in text.asking.keys() - STOP if len(word) > 1 or not word.isascii()}


def contained(one: Set[str], other: Set[str], rate: float) -> bool:
    """Return whether the smaller set shares at least `rate` of its words with the other set."""
    return len(one & other) >= rate * min(len(one), len(other))


def opposed(one: Text, other: Text) -> bool:
    """Return whether a decisive word or a variable replaces another, or something is negated in
    only one prompt."""
    if one.decisive - other.decisive and other.decisive - one.decisive:
        return True
    if any(one.asking[word] != other.asking[word] for word in NEGATIONS):
        return True
    mine, yours = one.asking - other.asking, other.asking - one.asking
    if any(len(word) == 1 for word in mine) and any(len(word) == 1 for word in yours):
        return True
    return negates(mine, yours) or negates(yours, mine)


def negates(words: Counter[str], others: Counter[str]) -> bool:
    """Return whether one of the words is the negation of one of the others (`in-`, `un-`)."""
    return any(prefix + word in words for word in others for prefix in NEGATING)
