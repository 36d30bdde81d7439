"""The 25 verifiable instructions of IFEval (Zhou et al., arXiv 2311.07911), each as a test of
whether a response follows it.

INSTRUCTIONS maps an instruction's published id to its rule; a rule's keyword arguments are the
published ones. Three rules are approximations, because the paper's code uses libraries that are not
installed here: sentences are counted by their final punctuation instead of a trained splitter,
words in capitals are split by white space and punctuation, and `languages.py` detects languages.
All rules take time linear in the response."""

import json
import re
from collections.abc import Callable

from tasks.grading.instructions.languages import LANGUAGES, could_be

Rule = Callable[..., bool]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
ABBREVIATIONS = {"mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "fig"}
SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]*]*+(?=\s|\Z)|[。！？।]+")
LAST_WORD = re.compile(r"[\w.]*\Z")
INITIALS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[A-Z]")  # e.g, J
MAX_ABBREVIATION = 8  # characters
CAPITAL_TOKEN = re.compile(r"[^\s.,;:!?\"()\[\]{}<>*]+")
MARKERS = {
    "P.S.": re.compile(r"p\.\s?s\."),
    "P.P.S": re.compile(r"p\.\s?p\.\s?s"),
}


def compares(number: int, relation: str, limit: float) -> bool:
    """Return whether a number is below a limit (relation `less than`) or not below it (`at least`).
    Raise ValueError for another relation."""
    if relation == "less than":
        return number < limit
    if relation == "at least":
        return number >= limit
    raise ValueError(f"the relation {relation!r} is neither 'less than' nor 'at least'")


def has_keywords(text: str, *, keywords: list[str]) -> bool:
    """Return whether all keywords occur, even inside other words, ignoring case."""
    return all(keyword.lower() in text.lower() for keyword in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Compare the count of a keyword, ignoring case, with `frequency` by `relation`."""
    return compares(text.lower().count(keyword.lower()), relation, frequency)


def no_forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """Return whether none of the words occurs as a whole word, ignoring case."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Compare the count of a letter, ignoring case, with `let_frequency` by `let_relation`."""
    return compares(text.lower().count(letter.lower()), let_relation, let_frequency)


def in_language(text: str, *, language: str) -> bool:
    """Return whether the response is in a language; an undetermined language passes. Raise
    ValueError for a language that cannot be detected."""
    if language not in LANGUAGES:
        raise ValueError(f"the language {language!r} is none of {', '.join(sorted(LANGUAGES))}")
    return could_be(text, language)


def number_of_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """Compare the number of sentences with `num_sentences` by `relation` (see `compares`)."""
    return compares(count_sentences(text), relation, num_sentences)


def count_sentences(text: str) -> int:
    """Return the number of sentences. Text after the last full sentence counts as another."""
    count = 0
    after = 0
    for end in SENTENCE_END.finditer(text):
        before = LAST_WORD.search(text[max(0, end.start() - MAX_ABBREVIATION) : end.start()])
        word = before[0] if before else ""
        is_short = INITIALS.fullmatch(word) is not None or word.lower() in ABBREVIATIONS
        more = end.end() < len(text)  # an abbreviation can end the last sentence
        if end[0].startswith(".") and more and is_short:
            continue
        count += 1
        after = end.end()
    return count + bool(re.search(r"\w", text[after:]))


def number_of_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Return whether there are exactly this many paragraphs separated by `***`; only the first and
    the last piece may be empty."""
    pieces = [piece.strip() for piece in text.split("***")]
    return all(pieces[1:-1]) and sum(map(bool, pieces)) == num_paragraphs


def number_of_words(text: str, *, num_words: int, relation: str) -> bool:
    """Compare the number of words (letters, digits and `_`) with `num_words` by `relation`."""
    return compares(sum(1 for _ in re.finditer(r"\w+", text)), relation, num_words)


def first_word_of_paragraph(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Return whether there are exactly this many paragraphs separated by two line breaks, and the
    first word of paragraph `nth_paragraph` (counted from 1) is `first_word`, ignoring case."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    count = sum(map(bool, paragraphs))
    index = int(nth_paragraph) - 1
    if count != num_paragraphs or not 0 <= index < count or not paragraphs[index]:
        return False
    word = paragraphs[index].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def placeholders(text: str, *, num_placeholders: int) -> bool:
    """Return whether there are at least this many placeholders such as [address]."""
    return sum(map(count_brackets, text.split("\n"))) >= num_placeholders


def count_brackets(line: str) -> int:
    """Return the number of non-overlapping `[...]` in a line."""
    count = 0
    end = -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """Return whether there is a postscript with this marker, ignoring case."""
    pattern = MARKERS.get(postscript_marker) or re.compile(re.escape(postscript_marker.lower()))
    return pattern.search(text.lower()) is not None


def bullets(text: str, *, num_bullets: int) -> bool:
    """Return whether exactly this many lines start with `*` (but not `**`) or `-`."""
    lines = [line.strip() for line in text.split("\n")]
    stars = [line for line in lines if line.startswith("*") and line[1:2] not in ("", "*")]
    dashes = [line for line in lines if line.startswith("-")]
    return len(stars) + len(dashes) == num_bullets


def constrained_response(text: str) -> bool:
    """Return whether one of the three prescribed answers occurs."""
    return any(option in text for option in OPTIONS)


def highlights(text: str, *, num_highlights: int) -> bool:
    """Return whether at least this many non-empty parts are marked like *this* or **this**."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in single + double) >= num_highlights


def sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Return whether the given word, followed by a number, occurs at least this many times."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def is_json(text: str) -> bool:
    """Return whether the whole response is JSON, in a fence or not."""
    text = re.sub(r"\A```(?:json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(text.strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """Return whether there is a non-empty title such as <<A title>>."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start:end].strip("<> \t"):
            return True
    return False


def two_responses(text: str) -> bool:
    """Return whether two different responses are separated by `******`; only the first and the last
    piece may be empty."""
    pieces = [piece.strip() for piece in text.split("******")]
    found = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(found) == 2 and found[0] != found[1]


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Return whether the response starts with the prompt, ignoring case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, *, end_phrase: str) -> bool:
    """Return whether the response ends with a phrase, ignoring case and quotation marks."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def in_quotation_marks(text: str) -> bool:
    """Return whether the whole response is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Compare the number of all-caps words with `capital_frequency` by `capital_relation`."""
    count = sum(token.isupper() for token in CAPITAL_TOKEN.findall(text))
    return compares(count, capital_relation, capital_frequency)


def all_capitals(text: str) -> bool:
    """Return whether the response is English and entirely in capitals."""
    return text.isupper() and could_be(text, "en")


def no_capitals(text: str) -> bool:
    """Return whether the response is English without capital letters."""
    return text.islower() and could_be(text, "en")


def no_comma(text: str) -> bool:
    """Return whether there is no comma."""
    return "," not in text


INSTRUCTIONS: dict[str, Rule] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": no_forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": in_language,
    "length_constraints:number_sentences": number_of_sentences,
    "length_constraints:number_paragraphs": number_of_paragraphs,
    "length_constraints:number_words": number_of_words,
    "length_constraints:nth_paragraph_first_word": first_word_of_paragraph,
    "detectable_content:number_placeholders": placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": bullets,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": highlights,
    "detectable_format:multiple_sections": sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with,
    "startend:quotation": in_quotation_marks,
    "change_case:capital_word_frequency": capital_words,
    "change_case:english_capital": all_capitals,
    "change_case:english_lowercase": no_capitals,
    "punctuation:no_comma": no_comma,
}
