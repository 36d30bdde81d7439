r"""Answers that a completion takes back, limits, hedges or does not finish, answers that are not
computed or not in the form that the question names, and spellings that are accepted.

Cases are separated by ` ~ ` or line breaks; `\n` is a line break within one. The gold is 42, or B
for `choice`."""

import re

import pytest

from tasks.grading.loading import load
from tasks.grading.verifiers import numeric

BOTH = ("math", "numeric")
WORDS = {name: {name: {"method": name, "words": True}} for name in BOTH}


def cases(text: str) -> list[str]:
    return [one.strip().replace(r"\n", "\n") for one in re.split(r" ~ |\n", text.strip())]


def verdicts(name: str, texts: str, gold: str, prompt: str = "") -> dict[str, str]:
    verify = load(name, {}).verify
    return {text: verify(text, gold, prompt).outcome for text in cases(texts)}


UNFINISHED = r"""
First guess \boxed{42}. Actually the answer is \boxed{17 ~ \boxed{42} Final answer: $\boxed{
\boxed{42} ... \boxed{} ~ \boxed{42}, so $\fbox{17 ~ <think>so \boxed{42}
<think>I think the answer is 42 ~ #### 42 Wait no #### ~ #### 42\nNo:\n####\n
<answer>42</answer> No, \boxed{17 ~ <answer>42</answer> or <answer> ~ \boxed{42}. So <answer>17
"""
TAKEN_BACK = r"""
\boxed{42} Wait, that is wrong. The correct answer is 17. ~ \boxed{42} **Answer: 17**
\boxed{42}\n#### 17 ~ <answer>42</answer> Sorry, the final answer is 17 ~ #### 42\nThe answer is 17.
\boxed{42} 答案是17。 ~ The answer is not \boxed{42}. ~ \boxed{17} ... (not \boxed{42})
It can't be \boxed{42}. ~ anything but \boxed{42} ~ \boxed{42} does not work.
$\boxed{42}$ is obviously wrong. ~ \boxed{42} (incorrect) ~ We can exclude \boxed{42}.
\boxed{42 \text{ is incorrect}} ~ \boxed{42 \text{ (wrong)}} ~ \boxed{42 (wrong)}
\boxed{42 \text{ isn't right}} ~ \boxed{42 \text{ or more}} ~ \boxed{42 \text{ or whatever}}
\boxed{42 \text{ at least}} ~ \boxed{42 \text{ and up}} ~ \boxed{42 \text{ I guess}}
\boxed{\boxed{42}17} ~ \boxed{17\boxed{42}} ~ \boxed{42?}
\boxed{42 \text{ km or } 42 \text{ miles}} ~ \boxed{17\phantom{42}} ~ \boxed{42\phantom{17}}
\boxed{\hphantom{17}42} ~ \boxed{\text{between 41 and } 42} ~ between 41 and 42 ~ 42 or whatever
42 km or 42 miles ~ \boxed{42!} ~ \boxed{42+} ~ \boxed{\lnot 42} ~ \boxed{42 (mod 50)}
"""
LIMITED = r"""
x = 17 or x = 42 ~ x = 17, x = 42 ~ less than 42 ~ at least 42 ~ no more than 42
It lies between 17 and 42. ~ 42! ~ 42+ ~ 42 (mod 50) ~ 42 mod 5 ~ \lnot 42 ~ ¬42 ~ 42 - x ~ {41,42}
\{41,42\} ~ (41,42) ~ 42 or something ~ #### 42+ ~ \boxed{8\pi + 42\pi}
The GCD of 42 and 42 is the same. ~ The product of 6 and 42 is even.
There are 42 of them, and I cannot find out how many have left.
We were given 42 apples and asked how many of them are left in the end.
\boxed{42 \text{ m or } 42 \text{ km}}
"""
ACCEPTED = r"""
It is not \boxed{17} but \boxed{42}. ~ \boxed{42} (not \boxed{17})
\boxed{17} is wrong. The answer is 42. ~ \boxed{42}, not 17 ~ The answer is 17? No. \boxed{42}
\boxed{42}. The answer is therefore an even number. ~ \boxed{42}. The answer is 42!
\boxed{42}. If the answer is 17, then x = 3, a contradiction. ~ \boxed{42}\n#### Check\n6*7 = 42
#### Step 2: end\n\boxed{42} ~ <think>17</think> \boxed{42} ~ <think>so <answer>42</answer>
\boxed{42 \text{ of the students}} ~ \boxed{42 \text{ more}} ~ \boxed{42 \text{ square units}}
\boxed{42 \text{ miles per hour}} ~ \boxed{\text{The total is } 42} ~ \boxed{\textnormal{42}}
We need at most \boxed{42} moves. ~ <answer>The answer is 42.</answer> ~ #### 42 because 6*7 = 42
[ 18 + 24 = 42 ]
So\n\n[ 18 + 24 = 42 ]
"""
NUMBERS_ACCEPTED = r"""
So she has 42 apples. ~ The answer is 42.\nI hope this helps! ~ So he needs 42 minutes to get home.
42 is the answer. ~ It is 42! ~ So the answer is\n$$\n6 \cdot 7 = 42\n$$ ~ A: 42
The answer should be 42, not 41. ~ So Tom has 10 + 32 = 42 marbles. This is the total.
The sum is $20 + 22 = 42$ and we are done. ~ The final result is 42, as computed.
There are 42 different ways to do it.
"""


@pytest.mark.parametrize("name", BOTH)
def test_answers_that_are_unfinished_or_taken_back_are_not_correct(name: str) -> None:
    assert set(verdicts(name, UNFINISHED, "42").values()) == {"unparsed"}
    found = verdicts(name, TAKEN_BACK, "42")
    assert [text for text, outcome in found.items() if outcome == "correct"] == []
    found = verdicts(name, ACCEPTED, "42")
    assert [text for text, outcome in found.items() if outcome != "correct"] == []
    corrected = verdicts(name, r"\boxed{17} is wrong. ~ \boxed{17} **Answer: 42**", "42")
    assert [*corrected.values()] == ["unparsed", "correct"]


def test_last_number_counts_only_as_the_answer_of_a_text() -> None:
    found = verdicts("numeric", LIMITED, "42")
    assert [text for text, outcome in found.items() if outcome == "correct"] == []
    found = verdicts("numeric", NUMBERS_ACCEPTED, "42")
    assert [text for text, outcome in found.items() if outcome != "correct"] == []


CHOSEN = r"""
The answer is A. No, B. ~ \boxed{A} is wrong. The answer is B. ~ \boxed{B} (not A)
The answer is B. A is also wrong. ~ Answer: b, because it is long ~ **Answer: b**, since
answer: b) Paris ~ The answer is (b). ~ The answer is b because of it
Between A and C, B is better. ~ B is right, A is not. ~ The answer is B, as C is also too large.
I also considered A, but the answer is B.
"""
NOT_CHOSEN = r"""
The answer is B. No, A ~ \boxed{B} is wrong. The answer is A. ~ B, but A is also right
The answer is B. Wait, it is A. ~ \boxed{B} **Answer: A** ~ The answer is not \boxed{B}.
\boxed{A} (not \boxed{B}) ~ \boxed{B \text{ is wrong}} ~ \boxed{B}: \boxed{A
<think>The answer is B ~ It could be A, B or C ~ A and B ~ I think A and B. ~ B is right and A too
A, B, C, D ~ The answer is B (or maybe C) ~ I choose A, B, C and D ~ It must be A or B.
B. On second thought, A ~ Answer: a boat
"""


def test_choice_is_the_last_letter_that_the_text_keeps() -> None:
    assert set(verdicts("choice", CHOSEN, "B").values()) == {"correct"}
    assert "correct" not in verdicts("choice", NOT_CHOSEN, "B").values()
    several = "It is A and C ~ Option A and C is right ~ The answer is A, C and I am sure"
    several += " ~ A, C) because ~ My answer: B. No, A, C."
    assert set(verdicts("choice", several, "AC").values()) == {"correct"}
    for gold in cases(
        r"(B) Paris ~ B. Paris ~ B: Paris ~ **B** Paris ~ \textbf{(B)}\ 12 ~ b) Paris"
    ):
        assert set(verdicts("choice", r"Answer: B ~ \boxed{\text{(B)}}", gold).values()) == {
            "correct"
        }
        assert verdicts("choice", "Answer: A", gold) == {"Answer: A": "wrong"}
        assert load("choice", {}).check(gold).outcome == "correct"


@pytest.mark.parametrize(
    ("gold", "given", "outcome"),
    [
        ("120", r"\prod_{k=1}^{5} k", "wrong"),
        ("12", r"\operatorname{lcm}(4,6) ~ \text{lcm}(4, 6) = \operatorname{lcm}(4, 6)", "wrong"),
        ("2", r"\int_0^2 x\,dx ~ x = \int_0^2 x\,dx ~ 1 + \int_0^1 2x\,dx", "wrong"),
        ("1", r"\lim_{x\to 0} \frac{\sin x}{x}", "wrong"),
        ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "wrong"),
        ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "wrong"),
        ("5", r"\max(3,5) ~ \gcd(10, 15)", "wrong"),
        ("2x", r"\frac{d}{dx} x^2", "wrong"),
        ("2", r"\int_0^2 x\,dx = 2 ~ 2 = \int_0^2 x\,dx ~ 2\text{ min}", "correct"),
        ("2", r"m_{\max} = 2 ~ 2! ~ \sqrt{4}", "correct"),
        (r"\sum_{k=1}^{n} k^2", r"\sum_{k=1}^n k^2", "correct"),
        ("100!", "100!+1 ~ 100!-1", "wrong"),
        ("100!", r"100! ~ 100 \cdot 99!", "correct"),
        (r"10^{80}\sqrt2", r"10^{80}\sqrt2 + 1", "wrong"),
        ("5*x-sin(x)+2", r"5x-\sin(x)+2 ~ 5x-\sin x+2", "correct"),
        ("ln(b)*b^x", r"b^x \ln b", "correct"),
        ("cos(pi/3)", r"\frac12", "correct"),
        ("4*t**2", "4t^2", "correct"),
        ("3:2", r"a:b = 3:2 ~ AB:CD=3:2 ~ \text{boys}:\text{girls}=3:2", "correct"),
        ("3:2", "x:y:z=3:2 ~ a:b=2:3", "wrong"),
        (r"\text{(C)}", r"C ~ \text{C} ~ \text{(C)}", "correct"),
        ("(1,2)", r"\{(1,2)\}", "correct"),
        (r"\{(1,2)\}", "(1,2)", "correct"),
        ("(1,2)", r"\{(1,2),(3,4)\} ~ \{(2,1)\}", "wrong"),
        ("5 cm", r"5\textnormal{ cm} ~ 5\textsf{ cm}", "correct"),
        ("2.5", "2 1⁄2 ~ 5∕2", "correct"),
        ('{"answer": 0.1000000000000000000001}', "0.1", "wrong"),
        ('{"any": [12345678901234567890.5]}', "12345678901234567890.5", "correct"),
    ],
)  # fmt: skip
def test_mathematics_is_computed_and_read_in_its_spellings(
    gold: str, given: str, outcome: str
) -> None:
    for text in cases(given):
        assert load("math", {}).verify(rf"\boxed{{{text}}}", gold).outcome == outcome, text


DECIMAL, COMMON = "Write it as a decimal.", "Express it as a common fraction."


@pytest.mark.parametrize(
    ("prompt", "gold", "right", "wrong"),
    [
        (DECIMAL, "0.5", "0.5 ~ .50 ~ x = 0.5", r"\frac12 ~ 1/2 ~ 50\%"),
        (COMMON, r"\frac12", r"\frac12 ~ 1/2 ~ x=\frac{1}{2}", r"0.5 ~ \frac24"),
        ("Give it in simplest form.", r"\frac12", r"\frac12", r"\frac{2}{4}"),
        ("in simplest radical form", r"2\sqrt3", r"2\sqrt{3}", r"\sqrt{12}"),
        ("Give a mixed number.", r"2\frac12", r"2\frac12 ~ 2 1/2", r"\frac52"),
        ("As a percentage?", r"25\%", r"25\% ~ 25", r"0.25 ~ \frac14"),
        ("In scientific notation?", r"6\times10^3", r"6 \cdot 10^3", "6000"),
        (COMMON, "0.5", r"0.5 ~ \frac12", "0.6"),  # a gold without the form
        (
            "Compute $513^2 - 487^2.$",
            "26000",
            "26000",
            r"513^2 - 487^2. ~ Compute $513^2 - 487^2$.",
        ),
    ],
)
def test_answer_has_the_form_that_the_question_names(
    prompt: str, gold: str, right: str, wrong: str
) -> None:
    for texts, outcome in ((right, "correct"), (wrong, "wrong")):
        for text in cases(texts):
            assert load("math", {}).verify(rf"\boxed{{{text}}}", gold, prompt).outcome == outcome, (
                text
            )
    assert load("numeric", {}).verify("1/2", "0.5", DECIMAL).outcome == "wrong"


@pytest.mark.parametrize("name", BOTH)
def test_number_words_and_grouped_digits(name: str) -> None:
    spelled = load(name, WORDS[name]).verify
    for text, gold in {
        "Twelve apples": "12",
        "The answer is twenty-one.": "21",
        r"\boxed{\text{two thousand one hundred and five}}": "2105",
        "one million": "1000000",
        "The answer is 12.": "twelve",
    }.items():
        assert spelled(text, gold).outcome == "correct", text
        assert spelled(text, "13").outcome == "wrong"
    assert load(name, {}).verify(r"\boxed{\text{twelve}}", "12").outcome != "correct"
    for text in cases(
        r"60 000 ~ \boxed{60 000} ~ The answer is 60 000. ~ \boxed{60\ 000} ~ #### 60 000"
    ):
        assert load(name, {}).verify(text, "60000").outcome == "correct", text
    assert numeric.verify("in 2020 300 people", "300").outcome == "correct"
