"""Rollouts in the terminal: the chosen prompts and samples, and escaped text of models."""

from pathlib import Path
from typing import Any

import pytest

from flows.reading.comparisons import CLASSES, Request, read
from tasks.common.artifacts import PROMPTS, ROLLOUTS
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout

BEFORE = {"p0": "cw", "p1": "cw", "p2": "cc", "p3": "ww", "p4": "ee", "p5": "cw"}
AFTER = {"p0": "cc", "p1": "wt", "p2": "cc", "p3": "ww", "p4": "cw", "p5": "ee"}
LETTERS = {"c": "correct", "w": "wrong", "t": "truncated", "e": "error"}


def rollouts(outcomes: dict[str, str], text: str) -> list[dict[str, Any]]:
    """Return samples with these outcomes, and a greedy one for each prompt."""
    row = {**dict.fromkeys(ROLLOUTS.columns), "finish_reason": "stop", "completion_tokens": 3}
    return [
        {
            **row,
            "prompt_id": prompt,
            "sample_index": index,
            "greedy": index == len(letters),
            "outcome": LETTERS[(letters + letters[0])[index]],
            "reward": 0.5,
            "answer": "7\x07",
            "text": f"{text} {prompt} {index}",
        }
        for prompt, letters in outcomes.items()
        for index in range(len(letters) + 1)
    ]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path)
    prompt = {**dict.fromkeys(PROMPTS.columns), "verifier": "exact", "answer": "8\x1b[2J"}
    rows = [{**prompt, "prompt_id": name, "prompt": f"asked {name}\x1b"} for name in BEFORE]
    PROMPTS.write(layout.prompts("test"), PROMPTS.frame(rows))
    base, trained = (layout.policy_card, layout.baseline), layout.evaluation("sgpo", 0)
    for (card, folder), outcomes, text in (
        (base, BEFORE, "old\x1b]0;title\x07\r\x9b31m\x7f"),
        (
            (layout.trained_card("sgpo", 0), trained),
            AFTER,
            "new\u202e\u2028\u200f\u2066\n\t3 × π, 漢字\u00a0",
        ),
    ):
        write_checked(card, {"digest": "3f2a"})
        write_checked(folder / "metrics.json", {"policy": "3f2a"})
        ROLLOUTS.write(folder / "rollouts.parquet", ROLLOUTS.frame(rollouts(outcomes, text)))
    return layout


def shown(layout: Layout, prompt: str | None = None, kind: str | None = None, n: int = 9) -> str:
    return "\n".join(read(layout, "sgpo", 0, Request(prompt, kind, n, 1)))


def test_both_sides_of_a_prompt_are_shown(layout: Layout) -> None:
    text = shown(layout, "p0")
    assert "1 of 6 test prompts; sgpo, seed 0" in text
    assert "solved 50% before, 100% after" in text
    assert text.index("asked p0") < text.index("old") < text.index("new")
    assert "before, sample 0: correct, reward 0.5, answer 7" in text
    assert "after, greedy: correct" in text
    assert "p0 1" not in text  # one sample per side was requested
    assert "p1" not in text


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [
        ("learned", ["p0"]),
        ("lost", ["p1"]),
        ("solved", ["p2"]),
        ("unsolved", ["p3"]),
        ("correct", ["p0", "p2", "p4"]),
    ],
)
def test_a_class_chooses_prompts(layout: Layout, kind: str, prompts: list[str]) -> None:
    text = shown(layout, kind=kind)
    assert [name for name in BEFORE if f"prompt {name} " in text] == prompts


def test_a_prompt_without_a_graded_sample_has_no_rate(layout: Layout) -> None:
    text = shown(layout)
    assert "solved – before, 50% after" in text
    assert "solved 50% before, – after" in text


def test_only_invisible_characters_are_escaped(layout: Layout) -> None:
    text = shown(layout)
    assert all(one.isprintable() or one in "\n\t\u00a0" for one in text)
    for seen in (
        *("\\x1b[2J", "\\x1b]0;title\\x07\\r\\x9b31m\\x7f", "7\\x07", "asked p0\\x1b"),
        "\\u202e\\u2028\\u200f\\u2066\n\t3 × π, 漢字\u00a0",
    ):
        assert seen in text


def test_profile_and_baseline_are_shown_alone(layout: Layout) -> None:
    prompts = PROMPTS.read(layout.prompts("test"))
    PROMPTS.write(layout.prompts("train"), prompts)
    ROLLOUTS.write(layout.profile / "rollouts.parquet", ROLLOUTS.frame(rollouts(AFTER, "drawn")))
    text = "\n".join(read(layout, "profile", None, Request(None, "truncated", 9, 1)))
    assert text.startswith("1 of 6 train prompts; profile\n")
    assert "prompt p1   solved 0% in the profile" in text
    assert "profile, sample 1: truncated" in text  # the sample that has the outcome
    text = "\n".join(read(layout, "baseline", None, Request(None, "solved", 9, 1)))
    assert text.startswith("1 of 6 test prompts; baseline\n")
    assert "prompt p2   solved 100% in the baseline" in text
    with pytest.raises(ArtifactError, match="no train prompt of the class learned"):
        list(read(layout, "profile", None, Request(None, "learned", 9, 1)))


def test_missing_files_and_prompts_are_named(layout: Layout) -> None:
    with pytest.raises(ArtifactError, match=r"runs/sgp/0/eval/rollouts\.parquet does not exist"):
        list(read(layout, "sgp", 0, Request(None, None, 1, 1)))
    with pytest.raises(ArtifactError, match="no test prompt whose id begins with q of the class"):
        shown(layout, "q", "lost")
    write_checked(layout.trained_card("sgpo", 0), {"digest": "77b0"})
    with pytest.raises(ArtifactError, match=r"eval/metrics\.json is of another policy \(3f2a\)"):
        shown(layout)
    write_checked(layout.trained_card("sgpo", 0), {"digest": "3f2a"})
    test = layout.prompts("test")
    PROMPTS.write(test, PROMPTS.read(test)[1:])
    with pytest.raises(ArtifactError, match=r"baseline/rollouts\.parquet has other prompts than"):
        shown(layout)


def test_the_command_offers_every_class() -> None:
    from flows.cli.read import CLASSES as offered

    assert offered == CLASSES
