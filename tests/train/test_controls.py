"""The controllers that adapt to rewards: their rules by hand, and in simulations with known
answers."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.params import ParamsError
from tasks.train.data.plan import Plan
from tasks.train.data.rollouts import merge
from tasks.train.methods.control import dapo, dars, greso, knapsack, sagc
from tasks.train.methods.control import plan as follow
from tasks.train.settings import BatchSettings
from tasks.train.slots import Control, SoFar
from tests.train.steps import BATCH, START, after, answer_to, passes_of, plan_of, requested

SAGC: dict[str, Any] = {
    "group_sizes": [4, 8, 16],
    "threshold": 4.0,
    "budget": 0.2,
    "step": 0.2,
    "memory": 0.99,
    "max_multiplier": 20.0,
}


def greso_on(plan: Plan) -> greso.Method:
    return greso.Method(greso.Settings(), plan)


# --- dapo


def dapo_on(num_prompts: int, group_size: int, passes: int, size: int, max_refills: int) -> Any:
    """Return DAPO's control over a plan of equal groups, with batches of `size` rollouts."""
    plan = passes_of(num_prompts, group_size, passes, BatchSettings("rollouts", size, "generated"))
    return dapo.Method(dapo.Settings(max_refills), plan)


def test_dapo_fills_its_batch_with_mixed_groups_and_stops_at_the_limit() -> None:
    rng = np.random.default_rng(0)
    method = dapo_on(20, 2, 1, size=8, max_refills=2)
    first = requested(method, rng)
    assert first.counts.tolist() == [2] * 4
    drawn = [answer_to(first, [1, 0, 1, 1, 0, 0, 0, 1])]  # two of four are mixed
    second = requested(method, rng, after(*drawn))
    assert second.prompt_rows.tolist() == [4, 5]  # the missing two, from the plan
    drawn.append(answer_to(second, [1, 0, 1, 1]))
    third = requested(method, rng, after(*drawn))
    assert third.prompt_rows.tolist() == [6]
    drawn.append(answer_to(third, [1, 1]))
    assert method.next(after(*drawn), rng) is None  # the limit of two refills, one group short
    method.observe(merge(drawn))
    assert method.describe() == {"refills_mean": 2.0, "unfilled_rate": 1.0}
    full = requested(method, rng)
    assert full.prompt_rows.tolist() == [7, 8, 9, 10]
    assert method.next(after(answer_to(full, [1, 0] * 4)), rng) is None
    method = dapo_on(20, 4, 1, size=4, max_refills=2)
    graded = answer_to(requested(method, rng), [1, 0, 0, 0], errors=1)
    requested(method, rng, after(graded))  # three rollouts do not fill a batch
    kept = dapo.Method(dapo.Settings(2), replace(passes_of(20, 4, 1, BATCH), keeps=2))
    half = answer_to(requested(kept, rng), [1, 0, 0, 0] * 2 + [0] * 8)
    assert requested(kept, rng, after(half)).counts.tolist() == [4, 4]  # two of each count


# --- greso


def test_greso_repeats_a_plan_of_one_pass_without_its_dead_groups() -> None:
    """With a budget, a plan of one pass is repeated; the streak of three skips 7 of 8 visits."""
    method = greso_on(passes_of(1000, 2, 1, BatchSettings("rollouts", 10_000, "generated")))
    budget = SoFar(None, 0, 0, done=0.5)
    assert len(requested(method, so_far=budget).counts) == 1000  # nothing is known yet
    method.state.streaks[:] = 3
    again = requested(method, so_far=budget)
    assert len(again.counts) == pytest.approx(125, abs=32)  # three standard deviations


def test_greso_never_skips_in_the_first_pass_and_then_by_streak() -> None:
    method = greso_on(passes_of(4, 2, 3, BatchSettings("rollouts", 100, "generated")))
    assert method.skip_probability(np.arange(4)).tolist() == [0] * 4
    method.state.streaks = np.array([3, -3, 0, 9])
    np.testing.assert_allclose(method.skip_probability(np.arange(4, 8)), [0.875, 0.875, 0, 0.99])
    for seed in range(50):
        method.state.position = 4
        request = requested(method, seed)
        assert 2 in request.prompt_rows  # its last group was mixed


def test_greso_streaks_and_probabilities_change_as_published() -> None:
    method = greso_on(passes_of(4, 2, 3, BatchSettings("rollouts", 100, "generated")))
    request = requested(method)
    method.observe(answer_to(request, [1, 1, 0, 0, 1, 0, 0, 0]))
    assert method.state.streaks.tolist() == [1, -1, 0, -1]
    # both shares are at their targets or above
    np.testing.assert_allclose([method.state.p_easy, method.state.p_hard], [0.49, 0.49])
    method.observe(answer_to(request, [1, 1, 1, 1, 1, 0, 1, 0]))
    # a streak of the other kind starts again, and a mixed group resets it
    assert method.state.streaks.tolist() == [2, 1, 0, 0]
    np.testing.assert_allclose([method.state.p_easy, method.state.p_hard], [0.48, 0.50])
    method.observe(answer_to(request, [1, 0, 0, 0, 1, 0, 0, 0], errors=2))
    assert method.state.streaks.tolist() == [0, -1, 0, 0]
    method.state.streaks[3] = -5
    method.observe(answer_to(request, [1, 0, 0, 0, 1, 0, 0, 0], errors=2))
    # without graded rollouts nothing changes
    assert method.state.streaks.tolist() == [0, -2, 0, -5]
    p = (method.state.p_easy, method.state.p_hard)
    method.observe(answer_to(request, [0.0] * 8, errors=8))
    assert (method.state.p_easy, method.state.p_hard) == p


def test_greso_skips_at_the_predicted_rate() -> None:
    method = greso_on(passes_of(1000, 2, 2, BatchSettings("rollouts", 10_000, "generated")))
    method.state.streaks[:] = 3
    method.state.position = 1000
    request = requested(method)
    assert len(request.counts) == pytest.approx(125, abs=32)  # three standard deviations
    assert method.describe()["skipped_rate"] == 1 - len(request.counts) / 1000
    assert method.next(START, np.random.default_rng(0)) is None


def decided_at_once(method: greso.Method, rng: np.random.Generator) -> tuple[list[int], int]:
    """Return the visits and the end of the next step, if the whole phase is decided first."""
    plan, first = method.plan, method.state.position
    visits = np.arange(first, len(plan))
    visits = visits[plan.phases_V[visits] == plan.phases_V[first]]
    taken = visits[rng.random(len(visits)) >= method.skip_probability(visits)]
    num = plan.num_visits(plan.group_sizes_V[taken], plan.batch.size)
    if num < len(taken):
        return taken[:num].tolist(), int(taken[num - 1]) + 1
    return taken.tolist(), int(visits[-1]) + 1


@pytest.mark.parametrize("streak", [0, 1, 4, 9])
def test_windows_do_not_change_the_decisions_of_greso(streak: int) -> None:
    """Each visit takes one random number; windows leave out only visits without an effect."""
    method = greso_on(passes_of(3000, 4, 2, BatchSettings("rollouts", 32, "generated")))
    method.state.streaks[:] = streak * (1 - np.arange(3000) // 2000)  # the last third: no streak
    method.state.position = 2900
    for step in range(1000):
        if method.state.position == len(method.plan):
            break
        expected, end = decided_at_once(method, np.random.default_rng(step))
        taken, found_end = method.draw(method.state.position, 32, np.random.default_rng(step))
        assert (taken.tolist(), found_end) == (expected, end)
        method.next(START, np.random.default_rng(step))
    assert method.state.position == len(method.plan)
    assert method.describe()["skipped_rate"] == method.state.skipped / 3100


# --- knapsack


def test_limits_outside_the_plans_groups_are_refused() -> None:
    for size in (1, 33):
        with pytest.raises(ParamsError, match=f"groups of {size} to {size}, .* largest, 2 to 32"):
            knapsack.Method(knapsack.Settings(), passes_of(4, size, 1))
    with pytest.raises(ParamsError, match="largest is 64, and the plan's groups are no smaller"):
        dars.Method(dars.Settings(), passes_of(4, 64, 1))


def test_knapsack_counts_are_as_published() -> None:
    rates = np.array([0.0, 0.125, 0.5, 0.875])
    counts = knapsack.Method.best_counts(rates, 32, 2, 20)
    assert counts.tolist() == [2, 19, 7, 4]
    total = sum(knapsack.worth(rates[i : i + 1], counts[i : i + 1])[0, 0] for i in range(4))
    assert total == pytest.approx(0.216835, abs=1e-6)


def test_knapsack_is_optimal_against_brute_force() -> None:
    rates = np.array([0.2, 0.6, 0.9])
    for budget in (6, 9, 13, 18):
        best = max(
            knapsack.worth(rates, np.arange(2, 9))[np.arange(3), extra].sum()
            for extra in np.ndindex(7, 7, 7)
            if sum(extra) + 3 * 2 == budget
        )
        counts = knapsack.Method.best_counts(rates, budget, 2, 8)
        assert counts.sum() == budget
        worth = knapsack.worth(rates, np.arange(2, 9))[np.arange(3), counts - 2].sum()
        assert worth == pytest.approx(best)


def test_knapsack_estimates_rates_from_its_own_groups() -> None:
    rng = np.random.default_rng(0)
    settings = knapsack.Settings(smallest=2, largest=20, discount=0.5)
    plan = passes_of(4, 8, 2, BatchSettings("rollouts", 32, "generated"))
    method = knapsack.Method(settings, plan)
    first = requested(method, rng)
    assert first.counts.tolist() == [8] * 4  # there are no outcomes yet
    method.observe(answer_to(first, [0] * 8 + [1] + [0] * 7 + [1] * 4 + [0] * 4 + [1] * 7 + [0]))
    second = requested(method, rng)
    assert second.counts[0] == 8  # never solved: the plan's size
    assert second.counts.sum() == 32
    assert second.counts[1] == second.counts.max()
    method.observe(answer_to(second, [1.0] * 32))
    found = [method.state.correct[0], method.state.trials[0]]
    np.testing.assert_allclose(found, [8, 8 / 2 + 8])


# --- sagc


@cache
def simulate(
    steps: int, seed: int = 0, median: int = 40, **changes: Any
) -> tuple[np.ndarray, np.ndarray, sagc.Method]:
    """Return the sizes and straggler rates of steps with log-normal lengths (deviation 0.8)."""
    plan = plan_of([(0, 16)] * (16 * steps), BatchSettings("rollouts", 16, "generated"))
    method = sagc.Method(sagc.Settings(**(SAGC | changes)), plan)
    rng, sizes, rates = np.random.default_rng(seed), [], []
    for _ in range(steps):
        request = requested(method, rng)
        assert request.counts.sum() == 16  # the number of rollouts of a step is fixed
        lengths = np.maximum(np.exp(0.8 * rng.standard_normal(16)) * median, 1).astype(int)
        method.observe(answer_to(request, [0.0] * 16, lengths.tolist()))
        described = method.describe()
        sizes.append(described["group_size"])
        rates.append(described["straggler_rate"])
    return np.array(sizes), np.array(rates), method


@pytest.mark.parametrize("budget", [0.2, 0.3])
def test_sagc_spends_a_feasible_budget(budget: float) -> None:
    sizes, rates, method = simulate(3000, budget=budget)
    assert rates[500:].mean() == pytest.approx(budget, abs=0.02)
    assert method.state.multiplier < 20.0
    assert set(sizes) == {4.0, 8.0, 16.0}


def test_sagc_with_an_infeasible_budget() -> None:
    sizes, _, method = simulate(1500, median=200, budget=0.05)
    assert (sizes[500:] == 4).mean() > 0.9
    assert 19.0 < method.state.multiplier <= 20.0  # it stops at its cap
    more, some = (simulate(3000, budget=budget)[0][:1500] for budget in (0.3, 0.2))
    assert more.mean() > some.mean() > sizes.mean()


def test_sagc_is_deterministic_and_takes_large_groups_if_free() -> None:
    assert set(simulate(50, step=0.0)[0]) == {16.0}
    assert simulate.__wrapped__(80)[0].tolist() == simulate(80)[0].tolist()
    assert simulate(80, seed=1)[0].tolist() != simulate(80)[0].tolist()


def test_sagc_finds_stragglers_in_groups_of_two() -> None:
    straggles = sagc.has_straggler(np.array([1, 9, 2, 2]), np.array([0, 0, 1, 1]), 4.0 * 2.0)
    # against its own median a group of two never reaches 2.0
    assert straggles.tolist() == [True, False]


def test_sagc_refills_with_the_size_of_its_step() -> None:
    batch = BatchSettings("rollouts", 16, "generated")
    settings = {**SAGC, "group_sizes": [4]}
    methods = [
        sagc.Method(sagc.Settings(**settings, max_refills=number), passes_of(20, 8, 1, batch))
        for number in (0, 1)
    ]
    rng = np.random.default_rng(0)
    for method in methods:
        first = requested(method, rng)
        assert (first.prompt_rows.tolist(), first.counts.tolist()) == ([0, 1, 2, 3], [4] * 4)
    drawn = [answer_to(first, [1, 0, 0, 0] * 2 + [0] * 8)]  # two of four are mixed
    assert methods[0].next(after(*drawn), rng) is None
    second = requested(methods[1], rng, after(*drawn))
    assert (second.prompt_rows.tolist(), second.counts.tolist()) == ([4, 5], [4, 4])
    drawn.append(answer_to(second, [0] * 8))
    assert methods[1].next(after(*drawn), rng) is None  # the limit of one refill
    assert [method.asks_again for method in methods] == [False, True]


def test_sagc_chooses_among_the_sizes_up_to_the_plans() -> None:
    visits = [(0, 4)] * 9 + [(1, 8)] * 9 + [(2, 2)] * 9
    method = sagc.Method(sagc.Settings(**SAGC), plan_of(visits))
    while (request := method.next(START, np.random.default_rng(0))) is not None:
        assert method.describe()["group_size"] == request.counts.max()


# --- plan


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
            assert cost + (visits[end][1] if unit == "rollouts" else 1) > size  # it is full
        else:  # the last step of a phase includes a remainder below half a batch
            assert cost < max(size, first if unit == "rollouts" else 1) + size / 2
        assert {visits[row][0] for row in request.prompt_rows} == {request.phase}
        assert request.counts.tolist() == [visits[row][1] for row in request.prompt_rows]
        rows += request.prompt_rows.tolist()
        sampled = sum(visits[row][1] for row in rows)
        assert method.progress() == pytest.approx(sampled / plan.num_rollouts())
    assert rows == list(range(len(visits)))
