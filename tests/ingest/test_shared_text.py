"""Comparisons ignore text that all prompts of a source share, and no other text."""

import random

import pytest

from tasks.ingest.questions.identity import compared
from tasks.ingest.questions.shared_text import Sample, SharedText, SharedTexts, shared_text_of
from tests.ingest.helpers import DAPO, row

WHO = ["Ann", "Ben", "Cleo", "Dev", "Eva", "Finn", "Gita", "Hugo"]
WHAT = ["apples", "stamps", "marbles", "shells", "coins"]


def questions(count: int = 40) -> list[str]:
    """Return different questions of at least twelve words."""
    return [
        f"{WHO[n % 8]} had {n + 3} {WHAT[n % 5]} on {'Monday' if n % 3 else 'Friday'} and gave "
        f"away {n % 7 + 1} to {WHO[(n + 3) % 8]}. How many {WHAT[n % 5]} are left?"
        for n in range(count)
    ]


def wrapped(template: str, count: int = 40) -> list[str]:
    return [template.format(question) for question in questions(count)]


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        (DAPO, DAPO.partition("\n")[0], DAPO.rpartition("\n")[2]),
        (
            "Please solve the following math problem: {}. The assistant thinks, then answers. "
            "Return it in \\boxed{{}}, for example \\boxed{{1}}. ",
            "Please solve the following math problem:",
            "The assistant thinks, then answers. Return it in \\boxed{}, for example \\boxed{1}.",
        ),
        ("{}\nLet's think step by step.", "", "Let's think step by step."),
        ("请逐步推理并解答下面的数学问题：\n{}", "请逐步推理并解答下面的数学问题：", ""),
        ("Question: {}", "", ""),  # a single word is not enough
        ("{}", "", ""),
    ],
)
def test_words_around_every_question_are_found(template: str, start: str, end: str) -> None:
    found = shared_text_of(wrapped(template))
    assert found == (SharedText(start, end) if start or end else None)
    if found:
        stripped = [compared(found.stripped(prompt)) for prompt in wrapped(template)]
        assert stripped == [compared(question) for question in questions()]


@pytest.mark.parametrize(
    "prompts",
    [
        [f"Calculate {a} + {b}" for a in range(9) for b in range(9)],
        [f"State the result of this sum of numbers: {n} + {n + 1} - 4 =" for n in range(50)],
        [
            f"Spell the following word backwards, letter by letter: {w}{v}"
            for w in WHO
            for v in WHAT
        ],
        [f"How many legs do {n} spiders have when each of them has lost one?" for n in range(50)],
        [f"A train leaves at {n} o'clock and another one follows after it" for n in range(50)],
        questions(19),
    ],
)
def test_shared_words_of_generated_questions_are_kept(prompts: list[str]) -> None:
    assert shared_text_of(prompts) is None


def test_question_at_the_end_of_all_prompts_is_kept() -> None:
    prompts = [
        f"{question.partition(' How')[0]} How many things are left now? Answer with one number."
        for question in questions()
    ]
    found = shared_text_of(prompts)
    assert found == SharedText("", "Answer with one number.")
    assert found.stripped(prompts[0]).endswith("How many things are left now?")


def test_few_prompts_without_the_shared_text_are_kept_whole() -> None:
    others = ["Compute it.", DAPO.format("7"), "Solve the following math problem step by step."]
    prompts = [*wrapped(DAPO, 77), *others]
    found = shared_text_of(prompts)
    assert found is not None
    assert [found.stripped(other) for other in others] == ["Compute it.", "7", others[2]]
    assert found.stripped(DAPO.format("…")) == DAPO.format("…")  # else it would be empty
    assert shared_text_of([*wrapped(DAPO, 50), *questions(50)[5:]]) is None


def test_sample_does_not_depend_on_order_or_repetition() -> None:
    texts = [f"prompt {n}" for n in range(1000)]
    mixed = random.Random(0).choices(texts, k=3000) + texts
    one, two = Sample(), Sample()
    for text in texts:
        one.add(text)
    for text in mixed:
        two.add(text)
    assert one.texts() == two.texts()
    assert len(set(one.texts())) == 256


def test_every_source_of_an_entry_has_its_own_shared_text() -> None:
    samples = SharedTexts([0])
    for question in questions():
        samples.add(0, row(DAPO.format(question), source="verl/dapo"))
        samples.add(0, row(f"{question} Let's think step by step.", source="verl/gsm8k"))
        samples.add(1, row(DAPO.format(question), source="mine"))
    found = samples.shared()
    assert set(found) == {(0, "verl/dapo"), (0, "verl/gsm8k")}
    assert found[0, "verl/gsm8k"] == SharedText("", "Let's think step by step.")
