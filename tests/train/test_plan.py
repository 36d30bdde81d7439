"""The order of a plan's visits, and the steps that it makes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.methods.control import plan as follow
from tasks.train.plan import Plan
from tasks.train.settings import BatchSettings
from tasks.train.slots import Control
from tests.train.steps import (
    START,
    plan_of,
)


def test_a_step_of_the_plan_never_straddles_phases() -> None:
    visits = [(0, 4), (0, 4), (0, 4), (1, 2), (1, 2), (2, 16)]
    method: Control = follow.Method(plan_of(visits))
    steps = []
    while (request := method.next(START, np.random.default_rng(0))) is not None:
        steps.append((request.phase, request.counts.tolist()))
    # a group larger than the batch is a step of its own
    assert steps == [(0, [4, 4]), (0, [4]), (1, [2, 2]), (2, [16])]


many_visits = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=40
).map(lambda visits: sorted(visits, key=lambda visit: visit[0]))


@given(many_visits, st.integers(1, 20), st.sampled_from(["rollouts", "prompts"]))
def test_the_plan_is_followed_exactly(visits: list[tuple[int, int]], size: int, unit: Any) -> None:
    plan: Plan = plan_of(visits, BatchSettings(unit, size, "generated"))
    method: Control = follow.Method(plan)
    rows: list[int] = []
    while (request := method.next(START, np.random.default_rng(0))) is not None:
        cost = request.counts.sum() if unit == "rollouts" else len(request.counts)
        end, first = int(request.prompt_rows[-1]) + 1, int(request.counts[0])
        if end < len(visits) and visits[end][0] == request.phase:
            assert cost <= size or len(request.counts) == 1
        else:  # the last step of a phase takes a rest of less than half a batch in
            assert cost < max(size, first if unit == "rollouts" else 1) + size / 2
        assert {visits[row][0] for row in request.prompt_rows} == {request.phase}
        assert request.counts.tolist() == [visits[row][1] for row in request.prompt_rows]
        rows += request.prompt_rows.tolist()
        sampled = sum(visits[row][1] for row in rows)
        assert method.progress() == pytest.approx(sampled / plan.num_rollouts())
    assert rows == list(range(len(visits)))
