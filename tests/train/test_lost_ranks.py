"""Training of several processes when one of them dies or hangs: the others end, and the same
command resumes. If one hangs, the others report their rank and their step."""

import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.common.artifacts import Layout
from tasks.train.learner.ranks import LOST_RANK
from tests.engines.conftest import meetings
from tests.patience import PATIENCE
from tests.stages import Forked, Started, run_stage
from tests.train.test_sharding import same_tensors
from tests.train.worlds import make_world, outputs, write_params

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4] * 4
SILENT_SECONDS = 15


def world(
    root: Path, policy: Path, num_processes: int = 2, seconds: int = SILENT_SECONDS
) -> Layout:
    """Make a world for several processes, with a checkpoint after every step."""
    layout = make_world(root, policy, SIZES)
    engine, learner = {"num_processes": num_processes}, {"collective_timeout_seconds": seconds}
    write_params(layout, engine=engine, learner=learner)
    return layout


def command(layout: Layout) -> tuple[Any, ...]:
    params = layout.root / "params.yaml"
    return "train", params, layout.root, "--recipe", "r", "--seed", "0"


def rank_of(process: Started, rank: int) -> psutil.Process:
    """Return the process that torchrun started as this rank."""
    for child in psutil.Process(process.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if child.environ().get("RANK") == str(rank) and "tasks.train" in child.cmdline():
                return child
    raise AssertionError(f"there is no rank {rank}")


def start_ranks(layout: Layout, variables: Sequence[dict[str, str]]) -> list[Forked]:
    """Start these ranks as torchrun starts them."""
    line = command(layout)
    return [Forked(*line, variables=each) for each in variables]


def wait_for_checkpoint(layout: Layout, process: Started | Forked) -> None:
    while not list(layout.checkpoints.glob("*/step-*")):
        assert process.poll() is None, process.finish()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Return the run of a single process."""
    layout = world(tmp_path_factory.mktemp("alone"), guesser, num_processes=1)
    result = run_stage(*command(layout))
    assert result.returncode == 0, result.output
    return layout


def test_a_killed_rank_ends_the_others_and_they_resume(
    guesser: Path, tmp_path: Path, alone: Layout
) -> None:
    """The result equals that of one process. Other distributed state is in test_sharding.py."""
    layout = world(tmp_path, guesser)
    process = Started(*command(layout))
    wait_for_checkpoint(layout, process)
    everyone = psutil.Process(process.process.pid).children(recursive=True)
    rank_of(process, 0).kill()
    log = process.finish()
    assert process.returncode != 0
    _, alive = psutil.wait_procs(everyone, timeout=PATIENCE)
    assert alive == []
    assert "did not respond for" not in log
    assert not (layout.train("r", 0) / "policy").exists()

    ranks = start_ranks(layout, meetings(2))
    log = "".join(rank.finish() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], log
    assert log.count("resumed after") == log.count("train: done in") == 1  # only one rank logs it
    one, two = map(outputs, (alone, layout))
    for name in ("step", "group", "token_ids", "reward"):
        assert [row[name] for row in one["rollouts"]] == [row[name] for row in two["rollouts"]]
    assert json.loads(one["flops"])["charged"] == json.loads(two["flops"])["charged"]
    files = [each.train("r", 0) / "policy" / "model.safetensors" for each in (alone, layout)]
    assert same_tensors(*files, 1e-4)


def test_a_rank_that_hangs_ends_the_others(guesser: Path, tmp_path: Path) -> None:
    layout = world(tmp_path, guesser)
    first, second = start_ranks(layout, meetings(2))
    wait_for_checkpoint(layout, first)
    second.send_signal(signal.SIGSTOP)
    log = first.finish()
    second.kill()
    assert first.returncode == LOST_RANK
    assert not (layout.train("r", 0) / "policy").exists()
    assert "rank 0 of 2 on " in log
    assert f"did not respond for {SILENT_SECONDS} s (learner.collective_timeout_seconds)" in log


def test_a_rank_without_the_others_fails(guesser: Path, tmp_path: Path) -> None:
    layout = world(tmp_path, guesser, seconds=2)
    (process,) = start_ranks(layout, meetings(2)[1:])
    log = process.finish()
    assert process.returncode == LOST_RANK
    assert "rank 1 of 2 on " in log
    assert "before the first step: another process of this training did not respond for 2 s" in log
    assert "Traceback" not in log
