"""Verifiers and the process they run in: verdicts, limits, and workers that hang or die."""

import subprocess
import sys
from pathlib import Path

import pytest

import tasks.sampling.verifiers as verifiers
from tasks.common.artifacts import OUTCOMES
from tasks.common.files import ArtifactError
from tasks.sampling.grade import Answer, FailureRateError, Grader, Verify
from tasks.sampling.verifiers import exact, numeric


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        ("so it is 1,234.50 dollars", "1234.5", "correct"),
        ("#### -3", "-3.0", "correct"),
        ("4+3=7", "7", "correct"),
        ("7-9=-2", "-2", "correct"),
        ("4 - 3", "3", "correct"),
        ("7, then 8", "7", "wrong"),
        ("1.0000000000000000000001", "1", "wrong"),
        ("9" * 6000, "9", "wrong"),
        (".5", "0.5", "correct"),
        ("no number", "7", "unparsed"),
        ("", "7", "unparsed"),
        ("7", "seven", "error"),
    ],
)
def test_numeric(completion: str, gold: str, outcome: str) -> None:
    assert numeric.verify(completion, gold).outcome == outcome


def test_exact() -> None:
    assert exact.verify(" abc\n", "abc").outcome == "correct"
    assert exact.verify("Abc", "abc").outcome == "wrong"
    assert exact.verify(" \n", "abc").outcome == "unparsed"


def test_truncated_completions_are_not_judged_by_what_they_say() -> None:
    with Grader(Verify(5.0, 0.0)) as grader:
        verdicts = grader.grade([Answer("numeric", "7", "7", True), Answer("numeric", "7", "7", False)])
    assert [verdict.outcome for verdict in verdicts] == ["truncated", "correct"]


@pytest.fixture
def hostile_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier, in a folder of its own, that hangs, dies or raises when told to."""
    (tmp_path / "hostile.py").write_text(
        "import os, time\nfrom tasks.sampling.verdict import Verdict\n"
        "def verify(completion, answer):\n"
        "    if completion == 'hang': time.sleep(60)\n"
        "    if completion == 'die': os._exit(3)\n"
        "    if completion == 'raise': raise ValueError('boom')\n"
        "    return Verdict('correct', completion)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import tasks.sampling.verifiers as v\nv.__path__.append({str(tmp_path)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setattr(verifiers, "__path__", [*verifiers.__path__, str(tmp_path)])


@pytest.mark.usefixtures("hostile_verifier")
def test_a_worker_that_hangs_or_dies_costs_only_its_own_answer() -> None:
    texts = ["a", "hang", "b", "die", "c", "raise", "d"] + ["e"] * 50
    with Grader(Verify(0.5, 0.5)) as grader:
        verdicts = grader.grade([Answer("hostile", text, "", False) for text in texts])
    expected = {"hang": "timeout", "die": "error", "raise": "error"}
    assert [verdict.outcome for verdict in verdicts] == [expected.get(text, "correct") for text in texts]
    assert "boom" in verdicts[5].answer


@pytest.mark.usefixtures("hostile_verifier")
def test_too_many_failures_stop_with_examples() -> None:
    answers = [Answer("hostile", "raise", "gold 7", False)] * 3 + [Answer("hostile", "fine", "", False)] * 7
    with Grader(Verify(5.0, 0.2)) as grader, pytest.raises(FailureRateError, match=r"'error': 3.*boom.*gold 7"):
        grader.grade(answers)
    with Grader(Verify(5.0, 0.3)) as grader:
        assert [v.outcome for v in grader.grade(answers)].count("error") == 3


def test_long_answers_pass_through_the_pipe() -> None:
    answers = [Answer("exact", f"{i}" * 50_000, f"{i}" * 50_000, False) for i in range(8)]
    with Grader(Verify(5.0, 0.0)) as grader:
        assert {verdict.outcome for verdict in grader.grade(answers)} == {"correct"}


def test_an_unknown_verifier_is_named() -> None:
    with (
        Grader(Verify(5.0, 0.0)) as grader,
        pytest.raises(ArtifactError, match=r"'sympy' is unknown; .*exact.*numeric"),
    ):
        grader.grade([Answer("sympy", "", "", False)])


@pytest.mark.parametrize("path", sorted(Path(verifiers.__file__).parent.glob("[!_]*.py")), ids=lambda p: p.stem)
def test_every_verifier_returns_a_known_outcome(path: Path) -> None:
    texts = ["", "7", "\x00\ud800".encode("utf-8", "replace").decode(), "9**9**9", "{" * 1000, "\u202e7", "1" * 10**5]
    with Grader(Verify(5.0, 1.0)) as grader:
        verdicts = grader.grade([Answer(path.stem, text, "7", False) for text in texts])
    assert all(verdict.outcome in OUTCOMES[:3] for verdict in verdicts)
    assert verdicts[1].outcome == "correct"


def test_the_worker_starts_without_torch() -> None:
    """It is started again for every answer that hangs, so its start must stay cheap."""
    code = "import sys, tasks.sampling.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
