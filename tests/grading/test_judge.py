"""The verifier `judge`, against a server with configured votes."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.grading.grader import Answer, Grader
from tasks.grading.loading import load
from tasks.grading.settings import Verify
from tests.grading.judge_server import SETTINGS, Server, configured, judge_server
from tests.patience import PATIENCE, wait_for


@pytest.fixture
def server() -> Iterator[Server]:
    with judge_server() as server:
        yield server


def verify(server: Server, **changes: Any) -> Verify:
    return Verify(1, 5.0, 4.0, 0.5, configured(server, **changes))


def answers(*texts: str) -> list[Answer]:
    return [Answer("j", text, "7", False) for text in texts]


def test_majority_decides_and_every_verdict_is_stored(server: Server, tmp_path: Path) -> None:
    votes = answers("yes", "two", "one", "no", "yes")
    with Grader(verify(server), tmp_path / "judged.sqlite") as grader:
        first = grader.grade(votes)
        assert grader.judge_flops() == 2 * 7e9 * 500
        assert grader.judge_flops() == 0
    assert [v.outcome for v in first] == ["correct", "correct", "wrong", "wrong", "correct"]
    assert [v.score for v in first] == [1.0, 2 / 3, 1 / 3, 0.0, 1.0]
    assert len(server.requests) == 4  # one request for equal answers
    with Grader(verify(server, seconds=5.0), tmp_path / "judged.sqlite") as grader:
        assert [grader.grade([vote])[0] for vote in votes] == first
        assert grader.judge_flops() == 2 * 7e9 * 500  # in several calls, with reused verdicts
    assert len(server.requests) == 4
    with Grader(verify(server, model="other"), tmp_path / "judged.sqlite") as grader:
        grader.grade(votes[:1])
    assert len(server.requests) == 5


def test_damaged_verdict_is_requested_again(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "judged.sqlite"
    for outcome in ("correct", "correcu", "correct"):
        with Grader(verify(server), path) as grader:
            assert grader.grade(answers("yes"))[0].outcome == "correct"
        with closing(sqlite3.connect(path)) as database, database:
            row = "UPDATE verdicts SET value = replace(value, 'correct', ?)"
            database.execute(row, [outcome])
    assert len(server.requests) == 2
    assert "a verdict in" in caplog.text
    path.write_bytes(b"SQLite format 3" + b"x" * 5000)
    with (
        pytest.raises(ArtifactError, match="judged.sqlite.* is damaged .*delete it"),
        Grader(verify(server), path) as grader,
    ):
        grader.grade(answers("yes"))


def test_reply_without_a_vote_is_an_error_and_is_not_stored(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        with Grader(verify(server), tmp_path / "judged.sqlite") as grader:
            verdicts = grader.grade(answers("none", "yes"))
        assert [v.outcome for v in verdicts] == ["error", "correct"]
        assert "I cannot say" in verdicts[0].answer
    assert len(server.requests) == 3


def test_busy_server_is_retried_and_a_refusal_is_an_error(server: Server, tmp_path: Path) -> None:
    server.failures = 2
    with Grader(verify(server), tmp_path / "judged.sqlite") as grader:
        assert grader.grade(answers("yes"))[0].outcome == "correct"
    server.status = 401
    with (
        Grader(verify(server), tmp_path / "judged.sqlite") as grader,
        pytest.raises(ArtifactError, match="refused: status 401"),
    ):
        grader.grade(answers("two"))
    server.failures = 100
    with (
        Grader(verify(server), tmp_path / "judged.sqlite") as grader,
        pytest.raises(ArtifactError, match=r"failed 6 times.*503.*run again"),
    ):
        grader.grade(answers("two"))


@pytest.mark.parametrize(("variable", "sent"), [(None, None), ("JUDGE_KEY", "Bearer mine")])
def test_only_the_configured_key_and_the_question_are_sent(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    sent: str | None,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "mine")
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "another")
    with Grader(verify(server, key_variable=variable), tmp_path / "judged.sqlite") as grader:
        assert grader.grade(answers("yes {gold}"))[0].outcome == "correct"
    (headers,) = server.headers
    assert headers.get("authorization") == sent
    assert "another" not in headers.values()
    question = server.requests[0]["messages"][0]["content"]
    assert question == "Gold: 7\nAnswer: yes {gold}\nSay RIGHT or WRONG."


STAGE = """
import json, sys
from pathlib import Path
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer, Verify
settings = Verify(1, 5.0, 4.0, 0.5, json.loads(sys.argv[1]))
answers = [Answer("j", "hang", "7", False)]
with BackgroundGrader(settings, judged=Path(sys.argv[2])) as grader:
    grader.submit(answers).result()
"""


def test_interrupt_ends_a_stage_whose_judge_does_not_answer(server: Server, tmp_path: Path) -> None:
    section = json.dumps(configured(server, seconds=10 * PATIENCE))
    line = [sys.executable, "-c", STAGE, section, str(tmp_path / "judged.sqlite")]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as stage:
        try:
            wait_for(lambda: server.requests)
            stage.send_signal(signal.SIGINT)
            assert stage.wait(PATIENCE) == -signal.SIGINT
        finally:
            stage.kill()


def test_truncated_answers_and_golds_send_no_request(server: Server, tmp_path: Path) -> None:
    with Grader(verify(server), tmp_path / "judged.sqlite") as grader:
        assert grader.grade([Answer("j", "yes", "7", True)])[0].outcome == "truncated"
        assert [v.outcome for v in grader.check_golds([("j", "7")])] == ["correct"]
    assert server.requests == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "{gold}"}, "template must contain"),
        ({"wrong": "RIGHT"}, "two different words"),
        ({"votes": 0}, "votes is 0"),
        ({"key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"url": "http://u:p@127.0.0.1/v1"}, "url contains credentials"),
        ({"url": "http://127.0.0.1/v1?key=x"}, "url contains credentials or a query"),
        ({"tokens": 1}, "tokens is unknown"),
    ],
)
def test_invalid_settings_are_named(
    server: Server, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with (
        Grader(verify(server, **changes), tmp_path / "judged.sqlite") as grader,
        pytest.raises(ParamsError, match=message),
    ):
        grader.grade(answers("yes"))


def test_judge_cannot_be_part_of_another_verifier() -> None:
    verifiers = {
        "j": {**SETTINGS, "url": "http://127.0.0.1:1/v1"},
        "both": {"method": "composite", "weights": {"exact": 0.5, "j": 0.5}},
    }
    with pytest.raises(ParamsError, match="cannot be part of both"):
        load("both", verifiers)
