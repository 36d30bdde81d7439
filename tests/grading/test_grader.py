"""Verifiers and their processes: verdicts, limits, and workers that hang or die."""

import resource
import subprocess
import sys

import pytest
import yaml

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.common.processes.pool import Work
from tasks.grading.grader import Answer, Grader
from tasks.grading.loading import load
from tasks.grading.settings import Verify
from tasks.ingest import golds
from tests.patience import is_running, wait_for

CONFIGURED = {
    "tags": {"method": "format", "tags": ["think", "answer"], "text_after": False},
    "both": {"method": "composite", "weights": {"numeric": 0.75, "tags": 0.25}},
    "qa": {"method": "qa", "threshold": None},
    "sum": {"method": "composite", "weights": {"numeric": 0.5, "hostile": 0.5}},
}


def verify(seconds: float = 5.0, max_failure_rate: float = 0.0) -> Verify:
    return Verify(2, seconds, 4.0, max_failure_rate, CONFIGURED)


@pytest.mark.usefixtures("hostile_verifier")
def test_worker_that_hangs_or_dies_fails_only_its_own_answer() -> None:
    texts = ["a", "hang", "b", "die", "print", "raise", "d", *(f"e{i}" for i in range(50))]
    with Grader(verify(1.0, 0.5)) as grader:
        verdicts = grader.grade([Answer("hostile", text, "", False) for text in texts])
    expected = {"hang": "timeout", "die": "error", "raise": "error"}
    assert [verdict.outcome for verdict in verdicts] == [
        expected.get(text, "correct") for text in texts
    ]
    assert verdicts[1].answer == "no answer in 1 s of CPU time"
    assert "boom" in verdicts[5].answer
    graded = [verdict.answer for verdict in verdicts if verdict.outcome == "correct"]
    assert graded == [text for text in texts if text not in expected]


@pytest.mark.usefixtures("hostile_verifier")
def test_score_outside_0_to_1_is_an_error() -> None:
    """Also the score of a part: a reward of nan would silently train nothing."""
    with Grader(verify(max_failure_rate=1.0)) as grader:
        for score in ("nan", "-0.5", "1.5", "0.0"):
            answers = [Answer(name, f"score {score}", "7", False) for name in ("hostile", "sum")]
            for verdict in grader.grade(answers):
                assert (verdict.outcome == "error") == (score != "0.0"), verdict
                assert (
                    score == "0.0" or f"score is {score}: it must be from 0 to 1" in verdict.answer
                )


def test_first_list_of_a_process_has_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one process gets 50 answers of a verifier that takes seconds for each."""
    sizes, take = [], Work.take
    monkeypatch.setattr(Work, "take", lambda work, size: sizes.append(size) or take(work, size))
    with Grader(verify()) as grader:
        grader.grade([Answer("exact", "7", "7", False)] * 64)
    assert sizes[0] == 1


def test_long_numbers_pass_through_the_pipe_and_are_graded() -> None:
    numbers = [f"{i}" * 50_000 for i in range(1, 9)]
    answers = [
        Answer(name, rf"\boxed{{{number}}}", number, False)
        for name, number in zip(["math", "numeric"] * 4, numbers, strict=True)
    ]
    with Grader(verify()) as grader:
        assert {verdict.outcome for verdict in grader.grade(answers)} == {"correct"}


def test_unknown_verifier_is_named() -> None:
    with (
        Grader(verify()) as grader,
        pytest.raises(ArtifactError, match=r"'sympy' is unknown; .*exact.*numeric"),
    ):
        grader.grade([Answer("sympy", "", "", False)])


@pytest.mark.parametrize("name", ["code", "ifeval", "qa"])
def test_error_for_missing_settings_has_a_block_to_paste(name: str) -> None:
    with pytest.raises(ParamsError, match=f"the verifier {name} needs settings") as error:
        load(name, {})
    _, _, block = str(error.value).partition("as needed:\n")
    pasted = yaml.safe_load(block)["verify"]["verifiers"]
    if name == "code":
        pasted["code"]["sandbox"] = "process"  # bubblewrap may be missing
    assert load(name, pasted).version


def test_worker_starts_without_torch() -> None:
    """A worker is restarted after each answer that hangs, so its start must be fast."""
    code = "import sys, tasks.grading.verifier_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_golds_are_checked_by_their_verifiers() -> None:
    outcomes = {
        ("numeric", "9 (apples)"): "correct",
        ("numeric", "none"): "error",
        ("both", "7"): "correct",
        ("both", "none"): "error",
        ("tags", ""): "correct",
        ("exact", ""): "unparsed",
        ("exact", '{"any": ["7", "8"]}'): "error",
    }
    with Grader(verify()) as grader:
        verdicts = grader.check_golds(list(outcomes))
    assert [verdict.outcome for verdict in verdicts] == list(outcomes.values())
    assert "'none' is not one number" in verdicts[1].answer


def test_golds_are_compared_answer_by_answer() -> None:
    same = {
        ("both", "1,200", "1200"): True,
        ("both", "1", "2"): False,
        ("hendrycks", "1,200", "1200"): True,
        ("math", '{"any": ["1/2", "0.5"]}', "0.5"): True,
        ("numeric", '{"all": ["1", "2"]}', '{"all": ["2", "1.0"]}'): True,
        ("numeric", '{"any": ["1", "2"]}', '{"any": ["3", "2"]}'): False,
        ("numeric", '{"any": ["1", "2"]}', '{"all": ["1", "2"]}'): False,
        ("numeric", '{"answer": "1", "tolerance": 1}', "1"): False,
        ("qa", '["Paris", "Lutetia"]', '{"any": ["lutetia", "paris"]}'): True,
        ("qa", '["Paris", "Lutetia"]', '["Paris", "Rome"]'): False,
        ("tags", "a", "b"): False,
    }
    with Grader(verify()) as grader:
        assert golds.equal(list(same), grader) == list(same.values())


@pytest.mark.usefixtures("hostile_verifier")
@pytest.mark.parametrize(("memory_gb", "ulimit"), [(1.0, resource.RLIM_INFINITY), (8.0, 1 << 30)])
def test_memory_of_a_worker_is_limited(memory_gb: float, ulimit: int) -> None:
    """The limit is `ulimit -v` if that is below the setting."""
    code = (
        "import resource\n"
        "from tasks.grading.grader import Answer, Grader, Verify\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({ulimit}, {ulimit}))\n"
        "answers = [Answer('hostile', text, '', False) for text in ('a', 'swell', 'b')]\n"
        f"with Grader(Verify(1, 20.0, {memory_gb}, 0.5, {{}})) as grader:\n"
        "    for verdict in grader.grade(answers): print(verdict.outcome, verdict.answer)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "correct a",
        "timeout over the memory limit of 1 GB (verify.memory_gb, or `ulimit -v`)",
        "correct b",
    ]


def test_memory_limit_below_the_need_of_the_start_is_an_error() -> None:
    code = (
        "import resource\n"
        "from tasks.grading.grader import Grader, Verify\n"
        "with Grader(Verify(1, 20.0, 4.0, 0.5, {})) as grader:\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (20 << 20, 20 << 20))\n"
        "    grader.versions(['exact'])\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "did not start" in ended.stderr
    assert "`ulimit -v` allows 0.0195 GB" in ended.stderr


def test_workers_end_with_their_parent() -> None:
    code = (
        "import os, signal\n"
        "from tasks.grading.grader import Answer, Grader, Verify\n"
        "grader = Grader(Verify(1, 5.0, 4.0, 0.0, {}))\n"
        "grader.grade([Answer('exact', 'a', 'a', False)])\n"
        "print(grader.pool.processes[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    worker = int(ended.stdout)
    wait_for(lambda: not is_running(worker))


def test_versions_of_the_verifiers_in_the_pool() -> None:
    with Grader(verify()) as grader:
        versions = grader.versions(["numeric", "both"])
        assert grader.versions(["numeric"]) == {"numeric": versions["numeric"]}
    assert len(set(versions.values())) == 2
