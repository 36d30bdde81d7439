"""Graders and programs that are killed or paused from outside: no verdict changes."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.grading.grader import Answer, Grader, Verify
from tasks.grading.programs.sandbox import children_of, family
from tests.grading.test_code import SETTINGS, SUM
from tests.patience import PATIENCE, is_running, wait_for

pytestmark = pytest.mark.usefixtures("hostile_verifier")

LIMIT, PAUSE = 6.0, 8.0  # seconds: the clock limit of an answer and of a program, and the pause
# it waits for a file that the test creates
PROGRAM = """```python
import os, time
open('here', 'w')
while not os.path.exists('go'): time.sleep(0.01)
print(sum(map(int, input().split())))
```"""


def code(kind: str, seconds: float) -> dict[str, dict[str, Any]]:
    return {"code": {**SETTINGS, "sandbox": kind, "seconds": seconds, "total_seconds": PATIENCE}}


def waiting_at(flag: Path) -> set[int]:
    """Return the workers that wait for this file."""
    return {int(path.suffix[1:]) for path in flag.parent.glob(f"{flag.name}.*")}


def programs(pid: int) -> set[int]:
    """Return the descendants of a process in whose folder the program waits."""
    return {one for one in family(pid) if Path(f"/proc/{one}/cwd/here").exists()}


def let_go(pids: set[int]) -> None:
    """Let the programs in the folders of these processes continue."""
    for pid in pids & programs(os.getpid()):
        Path(f"/proc/{pid}/cwd/go").touch()


def loader_of(grader: Grader, *verifiers: str) -> int:
    """Return the pid of the grader's loader, after it has loaded these verifiers."""
    grader.versions(verifiers)
    assert grader.pool is not None
    assert grader.pool.loader is not None
    return grader.pool.loader.popen.pid


@pytest.mark.parametrize(
    ("num_kills", "outcome", "answer"),
    [
        (2, "correct", "wait"),
        # after the first death, the answer may not have been the only one
        (3, "error", "the verifier failed: its process ended twice: signal SIGKILL"),
    ],
)
def test_answer_is_an_error_after_its_worker_died_twice_alone(
    num_kills: int, outcome: str, answer: str, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    with Grader(Verify(1, PATIENCE, 4.0, 1.0, {})) as grader, ThreadPoolExecutor(1) as thread:
        grading = thread.submit(grader.grade, [Answer("hostile", f"wait {flag}", "", False)])
        seen = set[int]()
        for _ in range(num_kills):
            (pid,) = wait_for(lambda: waiting_at(flag) - seen)
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        flag.touch()
        (verdict,) = grading.result(PATIENCE)
    assert verdict.outcome == outcome
    assert verdict.answer.startswith(answer)


def test_answers_whose_loader_is_killed_are_graded_again(tmp_path: Path) -> None:
    flags = [tmp_path / name for name in "ab"]
    answers = [Answer("hostile", f"wait {flag}", "", False) for flag in flags]
    with Grader(Verify(2, PATIENCE, 4.0, 0.0, {})) as grader, ThreadPoolExecutor(1) as thread:
        loader = loader_of(grader, "hostile")
        assert grader.pool is not None
        grader.pool.seconds_per_request = 1.0  # so slow that each is sent separately
        grading = thread.submit(grader.grade, answers)
        for flag in flags:
            wait_for(lambda flag=flag: waiting_at(flag))  # type: ignore[misc]
        os.kill(loader, signal.SIGKILL)
        for flag in flags:
            flag.touch()
        assert [verdict.outcome for verdict in grading.result(PATIENCE)] == ["correct"] * 2


def test_answer_of_a_stopped_worker_times_out() -> None:
    with Grader(Verify(1, 0.5, 4.0, 1.0, {}, clock_factor=4.0)) as grader:
        grader.grade([Answer("hostile", "a", "", False)])
        assert grader.pool is not None
        os.kill(grader.pool.processes[0].pid, signal.SIGSTOP)
        answers = [Answer("hostile", text, "", False) for text in "ab"]
        grader.pool.seconds_per_request = 1.0
        late, other = grader.grade(answers)
    assert (late.outcome, late.answer) == ("timeout", "no answer in 2 s on the clock")
    assert other.outcome == "correct"


STAGE = """
import json, sys
from tasks.grading.grader import Answer, Grader, Verify
configured, seconds, name, text, gold = json.loads(sys.argv[1])
with Grader(Verify(1, seconds, 4.0, 0.0, configured, clock_factor=3.0)) as grader:
    grader.versions([name])
    print(grader.pool.loader.popen.pid, flush=True)
    print(grader.grade([Answer(name, text, gold, False)])[0].outcome)
"""


@pytest.mark.parametrize(
    ("name", "paused"),
    [
        ("hostile", "graders"),
        pytest.param("code", "everything", marks=pytest.mark.sandbox),
    ],
)
def test_pause_beyond_the_limits_changes_no_verdict(name: str, paused: str, tmp_path: Path) -> None:
    """All processes of the graders or of the stage are stopped, like those of a frozen container.
    The limit is that of the pool, or of the program."""
    flag = tmp_path / "flag"
    seconds, text = (LIMIT / 3, f"wait {flag}") if name == "hostile" else (PATIENCE, PROGRAM)
    options = json.dumps([code("bubblewrap", LIMIT / 3), seconds, name, text, SUM])
    with subprocess.Popen([sys.executable, "-c", STAGE, options], stdout=subprocess.PIPE) as stage:
        assert stage.stdout is not None
        loader = int(stage.stdout.readline())
        waiting = wait_for(lambda: waiting_at(flag) | programs(loader))
        stopped = family(stage.pid if paused == "everything" else loader)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(PAUSE)
            flag.touch()
            let_go(waiting)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert stage.stdout.read() == b"correct\n"


LINES = {
    "process": ["worker", "runner", "program"],
    "bubblewrap": ["worker", "bubblewrap", "its child", "runner", "program"],
}
"""The processes from the loader's child to the program."""


def kill(loader: int, kind: str, place: str) -> None:
    """Kill the process at this place while the program waits, and wait for its end. Its parent may
    change."""
    waiting, pid = wait_for(lambda: programs(loader)), loader
    for _ in LINES[kind][: LINES[kind].index(place) + 1]:
        pid = children_of(pid)[-1]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, waiting)))


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("kind", "place"), [(kind, place) for kind, places in LINES.items() for place in places]
)
def test_program_that_is_killed_from_outside_is_graded_again(kind: str, place: str) -> None:
    settings = Verify(1, PATIENCE, 4.0, 0.0, code(kind, PATIENCE / 3))
    with Grader(settings) as grader, ThreadPoolExecutor(1) as thread:
        loader = loader_of(grader, "code")
        grading = thread.submit(grader.grade, [Answer("code", PROGRAM, SUM, False)])
        kill(loader, kind, place)
        let_go(wait_for(lambda: programs(loader)))
        (verdict,) = grading.result(PATIENCE)
    assert (verdict.outcome, verdict.answer) == ("correct", "2 tests passed")


@pytest.mark.sandbox
@pytest.mark.parametrize(("place", "outcome"), [("bubblewrap", "error"), ("runner", "wrong")])
def test_second_kill_is_wrong_if_the_program_may_have_sent_it(place: str, outcome: str) -> None:
    settings = Verify(1, PATIENCE, 4.0, 1.0, code("bubblewrap", PATIENCE / 3))
    with Grader(settings) as grader, ThreadPoolExecutor(1) as thread:
        loader = loader_of(grader, "code")
        one_test = '{"stdin_stdout": {"inputs": ["1 2"], "outputs": ["3"]}}'
        grading = thread.submit(grader.grade, [Answer("code", PROGRAM, one_test, False)])
        for _ in range(2):
            kill(loader, "bubblewrap", place)
        (verdict,) = grading.result(PATIENCE)
    assert verdict.outcome == outcome
    assert "SIGKILL" in verdict.answer
