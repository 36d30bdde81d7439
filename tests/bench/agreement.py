"""How far our verifiers agree with other projects' graders: a table of policy, cases and agreement,
and every disagreement; then, for each file of labelled completions, how many of the right and of
the wrong ones are accepted.

    WINNOW_REAL_DATA=../shared/data python -m tests.bench.agreement

Cases are the tests of sixteen projects' graders (verifier_cases.jsonl), each under the policy that
its project names. A policy is compared if one of our verifiers implements it. Not compared:
settings of math-verify that are not its defaults, tolerances and partial marks (torchforge,
reasoning-gym's cascade), DAPO's string equality after `Answer:`, rewards for length and repetition.
If we refuse a gold as unreadable, we agree with a grader that gives no marks for it."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.grading.answers import numbers
from tasks.grading.answers.marked import last_boxed
from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.grading.verifiers import choice, hendrycks, math_verify, numeric

TAGS = {"method": "format", "text_after": False}
PART = {"method": "part", "which": "last", "otherwise": "unparsed"}
CONFIGURED: dict[str, dict[str, Any]] = {
    "think": {**TAGS, "tags": ["think"], "text_after": True},
    "think_answer": {**TAGS, "tags": ["think", "answer"]},
    "math_after_think": {
        **PART,
        "verifier": "math",
        "pattern": r"(?s).*</(?:think|REASONING_END)>(.*)",
    },
    "numeric_of_all": {"method": "numeric", "after_think": False},
    "math_of_all": {"method": "math", "after_think": False},
    "math_in_answer": {
        **PART,
        "verifier": "math_of_all",
        "pattern": r"(?s)<answer>(.*?)</answer>",
        "otherwise": "whole",
    },
    "math_in_brackets": {
        **PART,
        "verifier": "math",
        "pattern": r"\[([^\[\]]*)\]",
        "otherwise": "whole",
    },
    "hendrycks_after_think": {**PART, "verifier": "hendrycks", "pattern": r"(?s).*</think>(.*)"},
    "gsm8k_strict": {**PART, "verifier": "numeric", "pattern": r"####(.*)"},
    "qa": {"method": "qa", "threshold": None},
    "qa_after_think": {
        **PART,
        "verifier": "qa",
        "pattern": r"(?s)\A(?:.*</think>)?(.*)\Z",
        "which": "first",
    },
    "numeric_in_answer": {**PART, "verifier": "numeric", "pattern": r"(?s)<answer>(.*?)</answer>"},
}
BY_GRADER = {
    "gsm8k_reward_fn": "math",
    "geometry3k_reward_fn": "math_in_brackets",
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math_after_think",
    "MathRubric": "math",
    "MathEnvironment": "math",
    "MathMultiRewardEnvironment": "numeric_in_answer",
    "geo3k_reward": "math",
    "math_equal": "math",
    "multichoice": "choice",
    "get_deepscaler_rule_based_reward": "hendrycks_after_think",
    "grade_answer": "hendrycks",
    "grade_answer_mathd": "hendrycks",
    "grade_answer_sympy": "hendrycks",
    "grade_answer_verl": "hendrycks",
    "think_format_reward": "think",
    "format_reward": "think_answer",
    "CountdownDataset.score_answer": "countdown",
}
# take answers, not completions
BOXED = {"grade_answer", "grade_answer_mathd", "grade_answer_sympy"}
DEFAULTS = {"match_types": ["latex", "expr"], "precision": 6}  # of math-verify
NORMALIZERS = {"strip_string", "_strip_string", "mathd_normalize_answer", "normalize_answer"}
BOXES = {"last_boxed_only_string", "remove_boxed", "extract_answer", "extract_boxed"}


def graders_verifier(case: dict[str, Any]) -> str | None:
    """Return our verifier that implements the case's policy, or None."""
    if case["source"]["test"] in ("test_signed_number_extraction", "test_basic_scenarios"):
        return "numeric"
    answers_in_words = ("test_puzzle_matcher_scenarios", "test_single_label", "test_list_labels")
    if case["source"]["test"] in answers_in_words:
        return "qa_after_think"
    if case["policy"].startswith("SkyRL gsm8k"):
        return "gsm8k_strict"
    return BY_GRADER.get(case["grader"])


def read_directly(case: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return our result and theirs for an input, for cases of normalisation and extraction; None
    for other cases."""
    text, expected, name = case.get("input"), case["expected"], case["grader"]
    if name in NORMALIZERS and text is not None:
        return hendrycks.normalize(text), expected
    if name in BOXES and text is not None:
        wanted = last_boxed(expected) if expected and last_boxed(expected) is not None else expected
        return last_boxed(text), wanted
    if name == "parse":
        return choice.find_letter(text), expected[-1] if expected else None
    if name in ("_extract_final_int", "extract_gsm8k_final_answer"):
        found = numeric.find_number(text)
        wanted = None if expected is None else str(expected).split()[0]
        return found and numbers.plain(found), wanted
    if name == "compare_strings" and {**DEFAULTS, **case["params"]} == DEFAULTS:
        return math_verify.verify(case["pred"], case["gold"]).outcome == "correct", expected
    return None


def compare(cases: list[dict[str, Any]]) -> Iterator[tuple[str, str, bool | None, str]]:
    """Yield (policy, id, whether we agree or None if none of our verifiers implements the policy,
    the two results)."""
    graded: list[tuple[dict[str, Any], Answer]] = []
    for case in cases:
        verifier, direct = graders_verifier(case), read_directly(case)
        if direct is not None:
            ours, theirs = direct
            yield case["policy"], case["id"], ours == theirs, f"ours {ours!r}, theirs {theirs!r}"
        elif verifier is None or isinstance(case.get("pred", case.get("input")), dict | list):
            yield case["policy"], case["id"], None, case["grader"]
        else:
            graded.append((case, answer_of(case, verifier)))
    with Grader(Verify(2, 20.0, 4.0, 1.0, CONFIGURED)) as grader:
        verdicts = grader.grade([answer for _, answer in graded])
    for (case, answer), verdict in zip(graded, verdicts, strict=True):
        ours = None if verdict.outcome == "error" else verdict.outcome == "correct"
        theirs = case["expected"] if case["expected"] is None else bool(case["expected"])
        text = (
            f"{answer.verifier} says {verdict.outcome} of {answer.completion[-60:]!r} (gold "
            f"{answer.gold[:40]!r})"
        )
        yield case["policy"], case["id"], ours == theirs or (theirs is False and ours is None), text


def answer_of(case: dict[str, Any], verifier: str) -> Answer:
    """Return the case as a completion with its gold."""
    given, gold = str(case.get("pred", case.get("input"))), case.get("gold")
    completion = rf"\boxed{{{given}}}" if case["grader"] in BOXED else given
    text = json.dumps(gold) if isinstance(gold, dict | list) else str(gold)
    return Answer(verifier, completion, text, False)


def labelled(folder: Path) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """Yield the name of each file of labelled completions, with (completion, gold, label)."""
    name = "gsm8k_openai_model_solutions.jsonl"
    solved = [
        (part["solution"], row["ground_truth"], part["is_correct"])
        for row in read(folder / name)
        for part in row.values()
        if isinstance(part, dict)
    ]
    yield name, solved
    name = "pods_labelled_completions.jsonl"
    yield name, [(row["completion"], row["gold"], row["correct"]) for row in read(folder / name)]
    name = "qwen25math_math100x8.jsonl"
    rows = read(folder / name)
    pairs = [
        (row, text, label)
        for row in rows
        for text, label in zip(row["code"], row["score"], strict=True)
    ]
    yield name, [(text, str(row["gt"]), label) for row, text, label in pairs]


def print_labelled(folder: Path) -> None:
    """Print the verdicts of `numeric` and `math`, of all text and of that after the reasoning."""
    names = ("numeric", "numeric_of_all", "math", "math_in_answer", "hendrycks")
    print(f"{'labelled completions':36} verifier        right accepted  wrong accepted")
    with Grader(Verify(2, 20.0, 4.0, 1.0, CONFIGURED)) as grader:
        for file, rows in labelled(folder):
            for name in names:
                verdicts = grader.grade([Answer(name, text, gold, False) for text, gold, _ in rows])
                counts = Counter(
                    (label, verdict.outcome == "correct")
                    for (_, _, label), verdict in zip(rows, verdicts, strict=True)
                )
                print(
                    f"{file:36} {name:14} {counts[True, True] + counts[True, False]:6} "
                    f"{counts[True, True]:8} {counts[False, True] + counts[False, False]:6} "
                    f"{counts[False, True]:8}"
                )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    table: dict[str, list[tuple[str, bool | None, str]]] = defaultdict(list)
    for policy, case, agrees, results_in_words in compare(
        read(Path(os.environ["WINNOW_REAL_DATA"]) / "verifier_cases.jsonl")
    ):
        table[policy].append((case, agrees, results_in_words))
    print(f"{'policy':72} cases  compared  agreed")
    for policy, results in sorted(table.items()):
        compared = [result for result in results if result[1] is not None]
        print(
            f"{policy[:72]:72} {len(results):5} {len(compared):9} "
            f"{sum(bool(r[1]) for r in compared):7}"
        )
        for case, agrees, results_in_words in compared:
            if not agrees:
                print(f"    {case}: {results_in_words}")
    print_labelled(Path(os.environ["WINNOW_REAL_DATA"]) / "rollouts")


if __name__ == "__main__":
    main()
