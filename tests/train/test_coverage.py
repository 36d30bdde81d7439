"""A replay whose groups resemble what was solved (facility location)."""

import contextlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.allocate import forecast
from tasks.common.params import ParamsError
from tasks.train.methods.replay import coverage
from tasks.train.rollouts import Rollouts
from tests.train.steps import rollouts_of
from tests.train.worlds import Killed, dying_after, make_world, outputs, run


def covered(alike: np.ndarray, chosen: list[int]) -> float:
    """The sum of everyone's likeness to the nearest chosen one."""
    return float(alike[chosen].max(axis=0).sum())


def groups_of(tokens: list[list[int]], prompt_rows: list[int]) -> Rollouts:
    """A mixed group for each completion, which is right; the wrong ones are all alike."""
    both = [ids for right in tokens for ids in (right, [9, 9, 9, 9])]
    made = rollouts_of(
        [1.0, 0.0] * len(tokens),
        np.repeat(np.arange(len(tokens)), 2).tolist(),
        [len(ids) for ids in both],
        prompt_rows,
    )
    return made.with_columns(token_ids=both)


def test_likeness_by_hand() -> None:
    """Bigrams 12 23, and 23 34: one of three is common. A short run is a gram of its own."""
    rollouts = groups_of([[1, 2, 3], [2, 3, 4], [7]], [0, 1, 2])
    grams = coverage.grams_of(rollouts, 2)
    assert grams == [{(1, 2), (2, 3)}, {(2, 3), (3, 4)}, {(7,)}]
    np.testing.assert_allclose(
        coverage.likeness([*grams, set(), set()]),
        [
            [1, 1 / 3, 0, 0, 0],
            [1 / 3, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 0, 1, 1],
            [0, 0, 0, 1, 1],
        ],
    )
    own = [[True, False, True], [True] * 4] * 2 + [[True], [True] * 4]
    apart = coverage.grams_of(rollouts.with_columns(is_action=own), 2)
    assert apart[0] == {(1,), (3,)}  # no gram goes across an environment's tokens


@given(st.integers(1, 9), st.integers(0, 2**31), st.data())
def test_the_greedy_choice_is_near_the_best(num: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num))
    alike = np.random.default_rng(seed).random((num, num)) ** 3
    alike = np.maximum(alike, alike.T)
    np.fill_diagonal(alike, 1.0)
    found = coverage.greedy(alike, size).tolist()
    assert len({*found}) == size
    subsets = itertools.combinations(range(num), size)
    best = max(covered(alike, [*subset]) for subset in subsets)
    assert covered(alike, found) >= (1 - 1 / np.e) * best - 1e-12


def test_what_resembles_most_stays() -> None:
    """Three alike and one apart: of the alike ones the first, then the one apart."""
    method = coverage.Method(coverage.Settings(capacity=2, n=2))
    same = [1, 2, 3]
    method.add(groups_of([same, same], [0, 1]))
    assert method.state.rollouts.prompt_rows_Q.tolist() == [0, 1]  # there is room
    method.add(groups_of([[5, 6, 7], same], [2, 3]))
    assert method.state.rollouts.prompt_rows_Q.tolist() == [0, 2]
    method.add(groups_of([[5, 6, 8]], [2]))  # the latest group of a prompt
    assert method.state.rollouts.prompt_rows_Q.tolist() == [0, 2]
    assert method.state.rollouts.table["token_ids"].to_list()[2] == [5, 6, 8]


def test_its_share_of_a_batch_is_forecast() -> None:
    assert forecast.completed("replay", {"method": "coverage"})["share"] == 0.5
    with pytest.raises(ParamsError, match=r"train.replay.n is 0; it must be at least 1"):
        coverage.Settings(n=0)
    with pytest.raises(ParamsError, match=r"train.replay.capacity is 0"):
        coverage.Settings(capacity=0)


def test_a_killed_run_goes_on_with_its_buffer(guesser: Path, tmp_path: Path) -> None:
    changes = {"replay": {"method": "coverage", "capacity": 3, "n": 2}, "learning_rate": 1e-2}
    layouts = [make_world(tmp_path / side, guesser, [4, 2, 6] * 8) for side in ("whole", "killed")]
    whole = run(layouts[0], changes)
    assert sum(row["num_replayed"] for row in whole.state.steps) > 0
    for last in (2, 4):
        with dying_after(last) as dying, contextlib.suppress(Killed):
            run(layouts[1], changes, prepare=dying)
    run(layouts[1], changes)
    first, second = map(outputs, layouts)
    assert first == second
