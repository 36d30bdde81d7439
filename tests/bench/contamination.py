"""Measure how many leaks the search for contamination finds, and how many other pairs.

    WINNOW_REAL_DATA=/data python -m tests.bench.contamination [--questions 1000] [--show]

1. Synthetic leaks: real questions with text around them, as publishers add it. Every question is
   also in the evaluation unchanged, so that a pair of two different questions counts as wrong. The
   rules were written with CHANGES in view, and before HELD_OUT.
2. Real pairs: DSR-sub against MATH's training set, and that set against itself. Candidate pairs are
   all pairs with a common subsequence of at least 0.8 of the shorter question's words, found by
   comparing all with all, without code of the search (`common_pairs` of this file at commit
   b812cc3d). The pairs with compatible numbers were read (for MATH against itself only if one has
   at most twice the words), and all pairs that the search finds. REAL has the leaks among them
   except equal questions, REWORDED the leaks in other words. `--show` prints the pairs on which the
   search and the labels differ."""

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl

from tasks.ingest.questions.contamination import Index, shared
from tasks.ingest.questions.identity import question_keys
from tasks.ingest.settings import Contamination
from tests.ingest.helpers import DAPO

SETTINGS = Contamination(overlap=0.7, ngram=3, same_numbers=True)
STEP_BY_STEP = " Let's think step by step and output the final answer within \\boxed{}."
FIGURE = '[asy] unitsize(0.5 cm); draw((0,0)--(4,0)--(4,3)--cycle); label("$x$", (2,0), S); [/asy]'
OPTIONS = (
    "\n$\\textbf{(A)}\\ 1\\qquad\\textbf{(B)}\\ 2\\qquad\\textbf{(C)}\\ 3\\qquad\\textbf{(D)}\\ 4$"
)


def after(added: str) -> Callable[[str], str]:
    """Return a change that appends a text."""
    return lambda text: f"{text} {added}"


CHANGES: dict[str, Callable[[str], str]] = {
    "form of the answer": after(
        "The original answer is in the form $\\frac{k}{m}$, please give the value of k + m."
    ),
    "form, in other words": after(
        "If the result is $\\frac{p}{q}$ in lowest terms, give $100p + q$ as your answer."
    ),
    "rounded": after("Round your answer to 2 decimal places."),
    "remainder": after("Find the remainder when the result is divided by 1000."),
    "a value": lambda text: re.sub(r"([.?]?)\s*$", r" when $n = 9$\1", text, count=1),
    "a figure": after(FIGURE),
    "options": after(OPTIONS),
    "a signature": after("*Proposed by A. Author and B. Author*"),
    "a contest": after("(2010 AIME I, Problem 9)"),
    "a hint": after("Hint: try it with 3 or 4 of them first."),
    "a number": lambda text: "12. (5 points) " + text,
    "a heading": lambda text: "**Problem 7** (Round 2, 2011)\n\n" + text,
    "a template": DAPO.format,
    "other delimiters": lambda text: re.sub(r"\$([^$]+)\$", r"\\(\1\\)", text),
    "a role": "As a student in grade 11, I have to solve the following: {}".format,
    "bold": lambda text: re.sub(r"(\d+)", r"**\1**", text),
    "all around": lambda text: f"Problem 3. {text} {FIGURE} Express your answer as $a/b$. (7 pts)",
}
# written after the rules, which were not changed for them. `a role` and `bold` were here first
# and failed (0.17 and 0.05 found); rules were added after that
HELD_OUT: dict[str, Callable[[str], str]] = {
    "a square": after("Let $k$ be the answer. What is $k^2 + 1$?"),
    "an assumption": after("(Assume that $\\pi = 3.14$ wherever it occurs.)"),
    "a time": "You have 5 minutes for this question, which is worth 7 points.\n{}".format,
    "a source": after("Source: Vietnam TST 2004, day 2"),
    "a note": after("Note: the figure is not drawn to scale; 1 cm is 2 units."),
    "yes or no": after("Is the result larger than 100? Answer yes or no."),
    "in words": after("Express the result in words, for instance twenty-one for 21."),
    "in a list": "1) {}\n2) What did you notice?".format,
}

# leaks among the real pairs: rows of DSR-sub and MATH, and of MATH and MATH
REAL: dict[str, set[tuple[int, int]]] = {
    "DSR-sub, MATH": {
        (125, 7176), (167, 3009), (386, 4634), (600, 3760), (644, 4398), (802, 7328), (886, 7355)
    },
    "MATH, MATH": {
        (59, 4037), (293, 3646), (535, 4006), (776, 1710), (835, 4084), (1155, 3870), (1653, 3824),
        (2674, 2979), (2945, 6964), (2978, 6754), (3482, 4310), (6017, 6056), (6747, 7024),
        (6872, 7353),
    },
}  # fmt: skip
REWORDED: dict[str, set[tuple[int, int]]] = {
    "DSR-sub, MATH": {(1114, 6616)},
    "MATH, MATH": {
        (95, 1020), (279, 4415), (2593, 2953), (4686, 6616), (4716, 4905), (5399, 5486),
        (5671, 5843),
    },
}  # fmt: skip


def search(train: Sequence[str], evaluation: Sequence[str]) -> list[set[int]]:
    """Return, for each training question, the indices of near evaluation questions."""
    common = shared(evaluation[:10_000], 3)
    index = Index(enumerate(evaluation), common, SETTINGS)
    return [{place for place, _ in index.search(text)} for text in train]


def made(
    questions: Sequence[str], changes: Mapping[str, Callable[[str], str]]
) -> list[tuple[str, float, int]]:
    """Return, for each change, the share of changed questions found, and the number of found pairs
    of different questions."""
    rows = []
    for name, change in changes.items():
        found = search([change(text) for text in questions], questions)
        hits = sum(n in places for n, places in enumerate(found))
        rows.append((name, hits / len(questions), sum(map(len, found)) - hits))
    return rows


def real(folder: Path, show: bool) -> list[str]:
    """Return, for each pair of sets, the number of equal questions, of leaks found, and of other
    pairs."""
    math = [row["problem"] for row in json.load((folder / "math_train/math.json").open())]
    chats = pl.read_parquet(folder / "dsr_sub_1209/dsr_sub.parquet")["prompt"].to_list()
    dsr = [chat[0]["content"].removesuffix(STEP_BY_STEP) for chat in chats]
    rows = []
    for (name, leaks), one in zip(REAL.items(), (dsr, math), strict=True):
        keys = [question_keys(text)["folded"] for text in math]
        mine = [question_keys(text)["folded"] for text in one]
        found = {
            (n, k)
            for n, places in enumerate(search(one, math))
            for k in places
            if mine[n] != keys[k] and (one is not math or n < k)
        }
        equal = len(set(mine) & set(keys)) if one is not math else len(math) - len(set(keys))
        reworded = REWORDED[name]
        rows.append(
            f"{name}: {equal} equal; of {len(leaks)} near leaks {len(found & leaks)} found, of "
            f"{len(reworded)} reworded {len(found & reworded)}, "
            f"{len(found - leaks - reworded)} other pairs"
        )
        if show:
            for n, k in sorted(found ^ (leaks | reworded)):
                print(f"{'wrong' if (n, k) in found else 'missed'} {n} {k}")
                print(f"  {one[n]}\n  {math[k]}")
    return rows


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    folder = Path(os.environ["WINNOW_REAL_DATA"])
    gsm8k = [json.loads(line)["question"] for line in (folder / "gsm8k/train.jsonl").open()]
    math = [row["problem"] for row in json.load((folder / "math_train/math.json").open())]
    half = options.questions // 2
    questions = [*gsm8k[:: len(gsm8k) // half][:half], *math[:: len(math) // half][:half]]
    for title, changes in (("all changes", CHANGES), ("all held out", HELD_OUT)):
        rows = made(questions, changes)
        mean = sum(recall for _, recall, _ in rows) / len(rows)
        for name, recall, others in [*rows, (title, mean, sum(row[2] for row in rows))]:
            print(f"{name:24} {recall:6.3f} found, {others} other pairs")
    for row in real(folder, options.show):
        print(row)


if __name__ == "__main__":
    main()
