"""Verdicts on hand-made cases, the contract of all verifiers, and hostile answers."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym as library

import tasks.grading.verifiers as verifiers
from tasks.common.artifacts import OUTCOMES
from tasks.common.params import ParamsError
from tasks.grading.answers.marked import contents
from tasks.grading.grader import Answer, Grader
from tasks.grading.loading import load
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict
from tasks.grading.verifiers import reasoning_gym
from tests.grading.test_code import ADD, SETTINGS
from tests.grading.test_ifeval import gold as ifeval_gold
from tests.grading.test_text_verifiers import JSON, QA, REGEX, WORDS

PART = {
    "method": "part",
    "verifier": "math",
    "pattern": "(?s).*</think>(.*)",
    "which": "last",
    "otherwise": "unparsed",
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "format": {"method": "format", "tags": ["think", "answer"], "text_after": False},
    "think": {"method": "format", "tags": ["think"], "text_after": True},
    "composite": {"method": "composite", "weights": {"numeric": 0.75, "format": 0.25}},
    "sympy": {"method": "math", "dialect": "sympy"},
    "part": PART,
    "regex": REGEX,
    "json_schema": JSON,
    "qa": QA,
    "ifeval": {"method": "ifeval", "loose": True},
    "length": {**WORDS, "unit": "characters", "minimum": 1, "maximum": 1},
    # the sandbox itself is tested in test_sandbox.py
    "code": {**SETTINGS, "sandbox": "process"},
    "strict": {**PART, "verifier": "numeric", "pattern": "####(.*)"},
}
COUNTDOWN = json.dumps({"numbers": [6, 34, 1, 11], "target": 38})
PROBLEM = library.create_dataset("countdown", seed=1, size=1)[0]

GOLDS = {
    "choice": "B",
    "code": ADD,
    "ifeval": ifeval_gold(
        ("keywords:existence", {"keywords": ["kept"]}),
        ("language:response_language", {"language": "en"}),
        ("length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"}),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}),
    ),
    "regex": r"\d",
    "json_schema": '{"type": "integer", "maximum": 7, "minimum": 7}',
    "countdown": COUNTDOWN,
    "reasoning_gym": reasoning_gym.gold("countdown", PROBLEM),
}
RIGHT = {
    "choice": "The answer is B.",
    "code": "```python\ndef add(a, b): return a + b\n```",
    "countdown": "<answer>34 + (11 - 1) - 6 = 38</answer>",
    "reasoning_gym": f"<answer>{PROBLEM['answer']}</answer>",
    "format": "<think>so</think>\n<answer>7</answer>",
    "ifeval": "It is kept in the [place].",
    "composite": "<think>so</think>\n<answer>7</answer>",
    "hendrycks": r"\boxed{7}",
    "part": r"<think>\boxed{8}</think> \boxed{7}",
}


def names() -> list[str]:
    """Return all verifiers except `judge`, which needs a server: see test_judge.py."""
    files = Path(verifiers.__file__).parent.glob("[!_]*.py")
    return sorted(path.stem for path in files if path.stem != "judge")


def graded(name: str, completion: str, gold: str) -> Verdict:
    return load(name, CONFIGURED).verify(completion, gold)


with Path(__file__).with_name("cases.csv").open(newline="") as file:
    CASES = list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted({case["verifier"] for case in CASES}))
def test_cases_by_hand(name: str) -> None:
    verify = load(name, CONFIGURED).verify
    found = []
    for case in CASES:
        if case["verifier"] == name:
            try:
                outcome = verify(case["completion"], case["gold"]).outcome
            except ValueError:
                outcome = "error"  # the worker turns any exception into an error
            found.append({**case, "found": outcome})
    assert [one for one in found if one["found"] != one["outcome"]] == []


@pytest.mark.parametrize("name", names())
def test_every_verifier_accepts_the_correct_answer_and_checks_golds(name: str) -> None:
    gold = GOLDS.get(name, "7")
    loaded = load(name, CONFIGURED)
    assert loaded.verify(RIGHT.get(name, "7"), gold).outcome == "correct"
    assert loaded.check(gold).outcome == "correct"
    assert loaded.version == load(name, CONFIGURED).version


@pytest.mark.parametrize(
    ("name", "thought", "answer", "gold"),
    [
        ("math", r"\boxed{7}", "So it is 8.", "8"),
        ("math_verify", r"\boxed{7}", "So it is $8$.", "8"),
        ("hendrycks", r"\boxed{8}, no: \boxed{7}", r"\boxed{8}", "8"),
        ("numeric", "#### 7", "So it is 8.", "8"),
        ("choice", r"\boxed{A}", "The answer is B.", "B"),
        ("qa", "<answer>Paris</answer>", "<answer>Rome</answer>", "Rome"),
        ("countdown", r"\boxed{34}", r"\boxed{34 + 11 - 6 - 1}", COUNTDOWN),
        ("code", "```python\ndef add(a, b): return 0\n```", RIGHT["code"], ADD),
    ],
)
def test_only_text_after_the_reasoning_is_graded_by_default(
    name: str, thought: str, answer: str, gold: str
) -> None:
    settings = CONFIGURED.get(name, {"method": name})
    after = load(name, CONFIGURED)
    whole = load("whole", {"whole": {**settings, "after_think": False}})
    assert after.version != whole.version
    assert after.verify(f"<think>{thought}</think>\n{answer}", gold).outcome == "correct"
    assert after.verify(f"<think>\n{answer}\n</think>", gold).outcome in ("unparsed", "wrong")
    is_tagged = "</answer>" in answer  # which ends an unclosed thought
    unclosed = after.verify(f"<think>\n{answer}", gold).outcome
    assert unclosed == ("correct" if is_tagged else "unparsed")
    assert whole.verify(f"<think>\n{answer}\n</think>", gold).outcome == "correct"


def test_nested_boxes_take_linear_time() -> None:
    """They take a hundredth of a second. A search for the end of every box takes minutes."""
    start = time.process_time()
    assert contents(r"\boxed{" * 50_000 + r"\boxed{7}") == ["7"]
    assert time.process_time() - start < 20
    assert contents(r"\boxed{1} \boxed{\boxed{2} \frac{3}{4}}} \boxed{5") == [
        "1",
        r"\boxed{2} \frac{3}{4}",
    ]


HOSTILE = {
    "empty": "",
    "power tower": "$9**9**9**9$ or 9**9**9**9 or \\boxed{9^{9^{9^9}}}",
    "nested braces": "\\boxed" + "{" * 50_000 + "8" + "}" * 50_000,
    "nested brackets": "(" * 50_000 + "8" + ")" * 50_000,
    "nested fractions": "$" + r"\frac{1}{" * 2000 + "8" + "}" * 2000 + "$",
    "one megabyte of digits": "9" * 2**20,
    "one megabyte of words": "so " * 2**18 + "none",
    "one megabyte of boxes": r"\boxed{" * 2**17,
    "NUL bytes": "\x00" * 1000 + "none\x00",
    "right-to-left marks": "\u202e\u200f\u202e none \u202c",
    "import": "__import__('os').system('touch HARMED') or exec(\"open('HARMED','w')\")",
    "import in a formula": "$__import__('os').system('touch HARMED')$ "
    "\\boxed{__import__('os').system('touch HARMED')}",
    "lone surrogates": "\ud800 \udfff none",
    "tags": "<answer>" * 100_000,
    "commas": "1,111" * 100_000,
}


@pytest.mark.slow
def test_hostile_answers_are_graded_in_time_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hostile answer is correct, and the correct answer after each is graded as usual. An answer
    that is executed would create a file."""
    answers = [
        Answer(name, text, GOLDS.get(name, "7"), False)
        for name in names()
        for hostile in HOSTILE.values()
        for text in (hostile, RIGHT.get(name, "7"))
    ]
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    with Grader(Verify(2, 1.0, 1.0, 1.0, CONFIGURED)) as grader:
        verdicts = grader.grade(answers)
    assert list(tmp_path.rglob("HARMED")) == []
    allowed = ({*OUTCOMES} - {"correct", "truncated"}, {"correct"})
    assert [
        (answer.verifier, answer.completion[:80], verdict)
        for place, (answer, verdict) in enumerate(zip(answers, verdicts, strict=True))
        if verdict.outcome not in allowed[place % 2]
    ] == []
    assert max(len(verdict.answer.encode()) for verdict in verdicts) < 5000


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("94*4 - 61 - (6 + 1)", True),
        ("x**2/2 + 3*sin(2*x) + sqrt(x)", True),
        ("['A', 'B', 'C']", True),
        ("__import__('os').system('true')", False),
        ("open('x', 'w')", False),
        ("(open)(x)", False),
        ("x.diff(y)", False),
        ("sin('open(1)')", False),
        ("[f'{open(1)}']", False),
        ("ｅval(x)", False),
        ("eval\\\n(x)", False),
        ("[open for x in y]", False),
    ],
)
def test_scorer_evaluates_only_harmless_text(text: str, harmless: bool) -> None:
    assert reasoning_gym.is_harmless(text) is harmless


def test_composite_keeps_every_mark_and_rewards_their_weighted_sum() -> None:
    both = graded("composite", "<think>so</think><answer>7</answer>", "7")
    assert both == Verdict("correct", "7", 1.0, (("numeric", 1.0), ("format", 1.0)))
    bare = graded("composite", "7", "7")
    assert (bare.outcome, bare.reward, bare.score) == ("correct", 0.75, 0.75)
    rewarded = graded("composite", "<think>so</think><answer>8</answer>", "7")
    assert (rewarded.outcome, rewarded.reward, rewarded.answer) == ("wrong", 0.25, "8")
    assert graded("composite", "7", "seven").outcome == "error"


def test_partial_credit_is_rewarded_only_by_a_composite() -> None:
    problem = {"answer": "34", "metadata": {"source_dataset": "chain_sum"}}
    gold = reasoning_gym.gold("chain_sum", problem)
    partial = graded("reasoning_gym", "34 it is", gold)
    assert (partial.outcome, partial.reward, partial.score) == ("wrong", 0.0, 2 / 8)
    composite = load(
        "rewarded", {"rewarded": {"method": "composite", "weights": {"reasoning_gym": 1.0}}}
    )
    assert composite.verify("34 it is", gold).reward == 2 / 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "sympy"},
            r"verify.verifiers.x.method is 'sympy'; use: .*exact, .*numeric",
        ),
        ({"method": "format", "tags": ["a"]}, "verify.verifiers.x.text_after is missing"),
        ({"method": "numeric", "decimals": 2}, "verify.verifiers.x.decimals is unknown"),
        ({"method": "numeric", "after_think": "no"}, "verify.verifiers.x.after_think"),
        ({"method": "exact", "after_think": True}, "verify.verifiers.x.after_think is unknown"),
        ({"method": "composite", "weights": {"numeric": 0.5}}, "sum to 1"),
        ({"method": "composite", "weights": {"numeric": 1.5, "exact": -0.5}}, "above 0"),
        ({"method": "composite", "weights": {"x": 1.0}}, "x -> x"),
        ({**PART, "pattern": "("}, "regular exp"),
        ({**PART, "pattern": "a"}, "one group"),
        ({**PART, "pattern": None}, "regular exp"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        load("x", {"x": settings})


def test_version_depends_on_settings_and_parts() -> None:
    weights = {"x": {"method": "composite", "weights": {"numeric": 0.5, "exact": 0.5}}}
    other = {"x": {"method": "composite", "weights": {"numeric": 0.6, "exact": 0.4}}}
    nested = {"x": {"method": "composite", "weights": {"t": 1.0}}, "t": CONFIGURED["think"]}
    changed = {**nested, "t": {**CONFIGURED["think"], "tags": ["thought"]}}
    versions = [load("x", configured).version for configured in (weights, other, nested, changed)]
    assert len(set(versions)) == 4
