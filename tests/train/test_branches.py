"""Decayed branches: the trunk continues as if there were none, and a branch ends like a run of its
share."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.artifacts import CURVE, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.loop.trainer import Trainer
from tests.train import worlds
from tests.train.worlds import make_world, outputs, run_in_process

BATCH = {"unit": "rollouts", "size": 8, "counts": "generated"}
CONSTANT = {"batch": BATCH, "decay_share": 0.4, "learning_rate": 3e-3}
VISITS = [4] * 40


def run(layout: Layout, fail_at: int | None = None, keep: int = 2, **changes: Any) -> Trainer:
    """Train with a checkpoint every step, and write the results; die after `fail_at` steps,
    including those of branches."""

    def prepare(trainer: Trainer) -> None:
        record, numbers = trainer.add_row, itertools.count(1)

        def dying(*arguments: Any) -> dict[str, Any]:
            if next(numbers) == fail_at:
                raise ConnectionError("pulled the plug")
            return record(*arguments)

        trainer.add_row = dying  # type: ignore[method-assign]

    return worlds.run(layout, {**CONSTANT, **changes}, keep=keep, prepare=prepare)


@pytest.fixture(scope="module")
def branched(guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, Trainer]:
    layout = make_world(tmp_path_factory.mktemp("branched"), guesser, VISITS)
    return layout, run(layout, branches=[0.25, 0.5])


def test_the_trunk_does_not_depend_on_its_branches(
    branched: tuple[Layout, Trainer], guesser: Path, tmp_path: Path
) -> None:
    layout, trainer = branched
    plain_layout = make_world(tmp_path, guesser, VISITS)
    plain = run(plain_layout)
    mine, theirs = outputs(layout), outputs(plain_layout)
    assert mine["weights"] == theirs["weights"]
    assert mine["steps"] == theirs["steps"]
    assert mine["rollouts"] == theirs["rollouts"]
    assert [row for row in mine["curve"] if row["branch"] is None] == theirs["curve"]
    ours, plains = trainer.state.ledger, plain.state.ledger
    for phase in ("generate", "score", "update"):
        assert ours.charged[phase] == plains.charged[phase]
        assert ours.executed[phase] == plains.executed[phase]
    # the first branch ends after 10 visits, 4 of its own, and the second after 20, 8 of its own
    assert ours.rollouts["branch"] == 12 * 4
    assert plains.rollouts["branch"] == 0
    assert ours.charged["branch"] > 0
    assert ours.rollouts["evaluate"] == plains.rollouts["evaluate"] + 2 * 6
    assert trainer.state.seconds["branch"] > 0


def test_a_branch_ends_like_a_run_of_its_share(
    branched: tuple[Layout, Trainer], guesser: Path, tmp_path: Path
) -> None:
    """It has the same visits, random numbers and rates."""
    short = run_in_process(make_world(tmp_path, guesser, VISITS[:20]), CONSTANT)
    curve = CURVE.frame(branched[1].state.curve)
    ends = curve.filter(pl.col("branch").is_not_null())
    assert ends["branch"].to_list() == [0.25, 0.5]
    assert ends["step"].to_list() == [5, 10]
    last = short.state.curve[-1]
    assert last["step"] == 10
    (end,) = ends.filter(pl.col("branch") == 0.5).to_dicts()
    assert {**end, "branch": None} == last


@pytest.mark.parametrize("fail_at", [4, 6, 11])
def test_a_kill_in_a_branch_loses_nothing(
    branched: tuple[Layout, Trainer], guesser: Path, tmp_path: Path, fail_at: int
) -> None:
    layout = make_world(tmp_path, guesser, VISITS)
    with pytest.raises(ConnectionError):
        run(layout, fail_at, branches=[0.25, 0.5])
    run(layout, branches=[0.25, 0.5])
    assert outputs(layout) == outputs(branched[0])


def test_a_branch_shorter_than_a_step_is_skipped(
    guesser: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = make_world(tmp_path, guesser, VISITS[:8])
    changes = {"batch": {**BATCH, "size": 16}, "decay_share": 0.1, "branches": [0.25, 0.8]}
    state = run_in_process(layout, changes).state
    assert "the branch to 0.8 of the run is skipped" in caplog.text
    assert all(point["branch"] is None for point in state.curve)


def states_of(layout: Layout) -> list[dict[str, Any]]:
    """Return the states of the checkpoints, in the order of writing."""
    (folder,) = [path for path in layout.checkpoints.iterdir() if not path.name.startswith(".")]
    steps = sorted(folder.glob("step-*"), key=lambda path: int(path.name.split("-")[2]))
    return [{**read_checked(path / "state.json")["state"], "folder": path} for path in steps]


def test_a_branch_does_not_change_the_optimizer_of_the_trunk(guesser: Path, tmp_path: Path) -> None:
    """There is no update before the fork: groups of one have no gradient."""
    visits = [1] * 16 + [4] * 30
    changes = {"decay_share": 0.9, "batch": BATCH, "learning_rate": 3e-3}
    weights = []
    for branches in ([], [0.6]):
        layout = make_world(tmp_path / str(len(branches)), guesser, visits)
        run(layout, branches=branches, **changes)
        weights.append(outputs(layout)["weights"])
    assert weights[0] == weights[1]


def test_a_damaged_checkpoint_after_a_branch_is_skipped(
    branched: tuple[Layout, Trainer], guesser: Path, tmp_path: Path
) -> None:
    """The last undamaged one is that of the fork, so the branch is trained again."""
    layout = make_world(tmp_path, guesser, VISITS)
    with pytest.raises(ConnectionError):
        run(layout, 6, 3, branches=[0.25, 0.5])
    states = states_of(layout)
    assert [state["branch"] for state in states] == [None, None, None]
    assert [state["branches_done"] for state in states] == [0, 1, 1]
    assert not list(layout.checkpoints.glob("*/step-*-branch"))
    for state in states[1:]:
        (state["folder"] / "tensors.safetensors").write_bytes(b"damaged")
    run(layout, keep=3, branches=[0.25, 0.5])
    assert outputs(layout) == outputs(branched[0])


def test_a_branch_without_its_trunk_is_refused_before_any_work(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, VISITS)
    with pytest.raises(ConnectionError):
        run(layout, 5, branches=[0.25, 0.5])
    *trunk, last = states_of(layout)
    assert last["branch"] == 0.25
    for state in trunk:
        shutil.rmtree(state["folder"])
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=2)
    with pytest.raises(ArtifactError, match="the trunk's checkpoint before .* is missing"):
        checkpoints.load(last["folder"])


@pytest.mark.parametrize(("max_steps", "measured"), [(4, []), (5, [0.25])])
def test_an_incomplete_branch_is_not_measured(
    max_steps: int, measured: list[float], guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, VISITS)
    curve = run(layout, branches=[0.25, 0.5], max_steps=max_steps).state.curve
    assert [point["branch"] for point in curve if point["branch"]] == measured
    assert curve[-1]["step"] == max_steps
