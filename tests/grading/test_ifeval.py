"""The rules of IFEval: each instruction is tested with responses that follow it and that do not,
written by hand from the paper's descriptions (`instructions.jsonl`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.grading.instructions.languages import LANGUAGES, could_be, language_of
from tasks.grading.instructions.rules import INSTRUCTIONS
from tasks.grading.loading import load
from tasks.grading.verdict import Verdict

FILE = Path(__file__).with_name("instructions.jsonl")
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]


def gold(*instructions: tuple[str, dict[str, Any]]) -> str:
    names, arguments = zip(*instructions, strict=True)
    return json.dumps({"instruction_id_list": names, "kwargs": arguments})


def graded(completion: str, answer: str, loose: bool = False) -> Verdict:
    return load("x", {"x": {"method": "ifeval", "loose": loose}}).verify(completion, answer)


def test_every_published_instruction_has_a_rule_and_a_case() -> None:
    assert {case["instruction"] for case in CASES} == set(INSTRUCTIONS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["instruction"])
def test_each_instruction(case: dict[str, Any]) -> None:
    answer = gold((case["instruction"], case["arguments"]))
    assert {graded(text, answer).outcome for text in case["followed"]} == {"correct"}
    assert {graded(text, answer).outcome for text in case["broken"]} == {"wrong"}


def test_score_is_the_share_of_followed_instructions() -> None:
    answer = gold(
        ("punctuation:no_comma", {}),
        ("keywords:existence", {"keywords": ["cat"]}),
        ("startend:quotation", {}),
    )
    two_of_three = Verdict("wrong", "startend:quotation", pytest.approx(2 / 3))
    assert graded("a cat", answer) == two_of_three
    assert graded('"a cat"', answer) == Verdict("correct", "", 1.0)
    assert graded(" \n", answer).outcome == "unparsed"


@pytest.mark.parametrize(
    ("completion", "name", "arguments"),
    [
        ("Sure, here it is:\nno comma", "punctuation:no_comma", {}),
        ("no comma\nI hope, this helps", "punctuation:no_comma", {}),
        ("Well, so\nno comma\nWell, so", "punctuation:no_comma", {}),
        ("**My answer is yes.**", "startend:end_checker", {"end_phrase": "yes."}),
    ],
)
def test_loose_rules_ignore_first_line_last_line_and_stars(
    completion: str, name: str, arguments: dict[str, Any]
) -> None:
    answer = gold((name, arguments))
    assert graded(completion, answer).outcome == "wrong"
    assert graded(completion, answer, loose=True).outcome == "correct"


def test_loose_verdict_is_wrong_if_no_variant_follows() -> None:
    answer = gold(("punctuation:no_comma", {}))
    assert graded("a, b\nc, d\ne, f", answer, loose=True).outcome == "wrong"
    assert graded("a, b", answer, loose=True).outcome == "wrong"  # it has no second line


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (gold(("punctuation:no_semicolon", {})), "'punctuation:no_semicolon' is unknown"),
        (gold(("keywords:existence", {})), "takes the arguments keywords; the gold gives none"),
        (gold(("punctuation:no_comma", {"n": 1})), "takes the arguments none; the gold gives n"),
        (
            gold(("length_constraints:number_words", {"num_words": 1, "relation": "around"})),
            "the relation 'around'",
        ),
        (gold(("language:response_language", {"language": "xx"})), "'xx' is none of ar, bg"),
        (gold(("keywords:existence", {"keywords": [1]})), "keywords:existence: "),
        ('{"instruction_id_list": ["a"], "kwargs": []}', "1 instructions and 0 arguments"),
        ('{"instruction_id_list": [], "kwargs": []}', "0 instructions"),
    ],
)
def test_unreadable_gold_is_an_error(answer: str, message: str) -> None:
    check = load("x", {"x": {"method": "ifeval", "loose": False}}).check
    with pytest.raises(ValueError, match=message):
        check(answer)


SENTENCES = {
    "ar": "هذا هو الكتاب الذي قرأته في المدينة",
    "bg": "Това е книгата, която прочетох в града.",
    "bn": "এটি একটি বই",
    "de": "Das ist das Buch, das ich in der Stadt gelesen habe.",
    "en": "This is the book that I have read in the city.",
    "es": "Este es el libro que he leído en la ciudad con los amigos.",
    "fa": "این کتابی است که در شهر خواندم",
    "fi": "Tämä on kirja, jonka olen lukenut, mutta se ei ole hyvä.",
    "fr": "C'est le livre que nous avons lu dans la ville avec des amis.",
    "gu": "આ એક પુસ્તક છે",
    "he": "זה הספר שקראתי בעיר",
    "hi": "यह किताब है जो शहर में पढ़ी थी",
    "it": "Questo è il libro che ho letto nella città con gli amici.",
    "ja": "これは町で読んだ本です。",
    "kn": "ಇದು ಒಂದು ಪುಸ್ತಕ",
    "ko": "이것은 도시에서 읽은 책입니다.",
    "ml": "ഇത് ഒരു പുസ്തകമാണ്",
    "mr": "हे पुस्तक आहे आणि ते शहरात नाही",
    "ne": "यो किताब हो र सहरमा पनि छ",
    "pa": "ਇਹ ਇੱਕ ਕਿਤਾਬ ਹੈ",
    "pl": "To jest książka, która nie jest dla dzieci i na pewno się sprzeda.",
    "pt": "Este é o livro que não está na cidade, mas você tem uma cópia.",
    "ru": "Это книга, которую мы прочитали в городе.",
    "sw": "Hiki ni kitabu cha watu wa mji na kwa ajili ya watoto.",
    "ta": "இது ஒரு புத்தகம்",
    "te": "ఇది ఒక పుస్తకం",
    "th": "นี่คือหนังสือ",
    "uk": "Це книга, яку ми прочитали в місті.",
    "ur": "یہ وہ کتاب ہے جو میں نے پڑھی",
    "vi": "Đây là cuốn sách mà tôi đã đọc và không có trong thành phố.",
}


@pytest.mark.parametrize("code", sorted(LANGUAGES))
def test_every_language_is_recognized(code: str) -> None:
    assert language_of(SENTENCES[code]) == code
    assert language_of(SENTENCES[code].upper()) == code


def test_text_without_common_words_has_no_language() -> None:
    assert [language_of(text) for text in ("", "123 + 4", "Xyzzy plugh")] == [None, None, "LATIN"]
    assert could_be("Xyzzy plugh", "en")
    assert not could_be("Xyzzy plugh", "hi")
    assert not could_be("漢字漢字", "en")
    assert not could_be("Καλημέρα", "en")
    assert language_of("これは本" + "漢" * 50) == "ja"
