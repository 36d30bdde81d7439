"""The controllers that look at what came out: their rules by hand, and in simulations with known
answers."""

from typing import Any

import numpy as np
import pytest

from tasks.common.params import ParamsError
from tasks.engines.engine import Samples
from tasks.train.methods.control import dapo, greso, knapsack, sagc
from tasks.train.rollouts import Request, Rollouts, merge
from tasks.train.settings import BatchSettings
from tests.train.test_slots import arrays

SAGC: dict[str, Any] = {
    "group_sizes": [4, 8, 16],
    "threshold": 4.0,
    "budget": 0.2,
    "step": 0.2,
    "memory": 0.99,
    "max_multiplier": 20.0,
}
GRESO = {
    "dead_rate": 0.25,
    "step": 0.01,
    "floor": 0.01,
    "p_start": 0.5,
    "p_min": 0.05,
    "p_max": 0.95,
}


def answered(
    request: Request, rewards: list[float], lengths: list[int] | None = None, errors: int = 0
) -> Rollouts:
    """Rollouts of a request with these rewards; the last `errors` could not be graded."""
    lengths = lengths or [1] * len(rewards)
    samples = Samples(
        [[5] * n for n in lengths], [[0.0] * n for n in lengths], ["stop"] * len(rewards)
    )
    group_B = np.repeat(np.arange(len(request.counts)), request.counts)
    outcomes = ["wrong"] * (len(rewards) - errors) + ["error"] * errors
    prompts = [[5]] * len(request.counts)
    return Rollouts(
        request.prompt_rows,
        prompts,
        group_B,
        samples,
        [""] * len(rewards),
        outcomes,
        np.array(rewards),
    )


def passes(num_prompts: int, size: int, num_passes: int) -> dict[str, np.ndarray]:
    """Plan columns of every prompt once a pass."""
    columns = arrays([(number, size) for number in range(num_passes) for _ in range(num_prompts)])
    return {
        **columns,
        "pass": columns["phase"],
        "prompt_row": np.tile(np.arange(num_prompts), num_passes),
    }


# --- dapo


def test_dapo_fills_its_batch_with_mixed_groups_and_stops_at_the_limit() -> None:
    rng = np.random.default_rng(0)
    state = dapo.start(passes(20, 2, 1), BatchSettings("rollouts", 8), max_refills=2)
    first = dapo.next(state, [], rng)
    assert first is not None
    assert first.counts.tolist() == [2] * 4
    drawn = [answered(first, [1, 0, 1, 1, 0, 0, 0, 1])]  # two of four are mixed
    second = dapo.next(state, drawn, rng)
    assert second is not None
    assert second.prompt_rows.tolist() == [4, 5]  # as many as are missing, from the plan
    drawn.append(answered(second, [1, 0, 1, 1]))
    third = dapo.next(state, drawn, rng)
    assert third is not None
    assert third.prompt_rows.tolist() == [6]
    drawn.append(answered(third, [1, 1]))
    assert dapo.next(state, drawn, rng) is None  # two refills is the limit, one group short
    dapo.observe(state, merge(drawn))
    assert dapo.describe(state) == {"refills_mean": 2.0, "unfilled_rate": 1.0}
    full = dapo.next(state, [], rng)
    assert full is not None
    assert full.prompt_rows.tolist() == [7, 8, 9, 10]
    assert dapo.next(state, [answered(full, [1, 0] * 4)], rng) is None
    state = dapo.start(passes(20, 4, 1), BatchSettings("rollouts", 4), max_refills=2)
    request = dapo.next(state, [], rng)
    assert request is not None
    assert (
        dapo.next(state, [answered(request, [1, 0, 0, 0], errors=1)], rng) is not None
    )  # three rollouts are no batch


def test_dapo_ends_with_its_plan_and_keeps_to_a_phase() -> None:
    rng = np.random.default_rng(0)
    state = dapo.start(passes(5, 2, 2), BatchSettings("rollouts", 8), max_refills=9)
    seen: list[int] = []
    while (request := dapo.next(state, [], rng)) is not None:
        parts = [answered(request, [1.0] * 2 * len(request.counts))]
        phases = {request.phase}
        while (more := dapo.next(state, parts, rng)) is not None:
            parts.append(answered(more, [1.0] * 2 * len(more.counts)))
            phases.add(more.phase)
        assert len(phases) == 1
        seen += [row for part in parts for row in part.prompt_rows_Q]
    assert seen == [0, 1, 2, 3, 4] * 2
    assert dapo.progress(state) == 1.0


# --- greso


def test_greso_never_skips_in_the_first_pass_and_then_by_streak() -> None:
    state = greso.start(passes(4, 2, 3), BatchSettings("rollouts", 100), **GRESO)
    assert greso.skip_probability(state, np.arange(4)).tolist() == [0] * 4
    state["streak"] = np.array([3, -3, 0, 9])
    assert greso.skip_probability(state, np.arange(4)).tolist() == [0] * 4  # pass 0
    np.testing.assert_allclose(
        greso.skip_probability(state, np.arange(4, 8)), [0.875, 0.875, 0, 0.99]
    )
    for seed in range(50):
        request = greso.next({**state, "position": np.array(4)}, [], np.random.default_rng(seed))
        assert request is not None
        assert 2 in request.prompt_rows  # its last group was mixed


def test_greso_streaks_and_probabilities_move_as_published() -> None:
    state = greso.start(passes(4, 2, 3), BatchSettings("rollouts", 100), **GRESO)
    request = greso.next(state, [], np.random.default_rng(0))
    assert request is not None
    greso.observe(state, answered(request, [1, 1, 0, 0, 1, 0, 0, 0]))
    assert state["streak"].tolist() == [1, -1, 0, -1]
    np.testing.assert_allclose(
        state["p"], [0.49, 0.49]
    )  # both shares are at their targets or above
    greso.observe(state, answered(request, [1, 1, 1, 1, 1, 0, 1, 0]))
    assert state["streak"].tolist() == [
        2,
        1,
        0,
        0,
    ]  # the other kind begins anew, a mixed group resets
    np.testing.assert_allclose(state["p"], [0.48, 0.50])
    greso.observe(state, answered(request, [1, 0, 0, 0, 1, 0, 0, 0], errors=2))
    assert state["streak"].tolist() == [0, -1, 0, 0]
    state["streak"][3] = -5
    greso.observe(state, answered(request, [1, 0, 0, 0, 1, 0, 0, 0], errors=2))
    assert state["streak"].tolist() == [
        0,
        -2,
        0,
        -5,
    ]  # nothing graded: nothing learned, nothing forgotten
    p = state["p"].tolist()
    greso.observe(state, answered(request, [0.0] * 8, errors=8))
    assert state["p"].tolist() == p


def test_greso_skips_at_the_rate_it_says() -> None:
    state = greso.start(passes(1000, 2, 2), BatchSettings("rollouts", 10_000), **GRESO)
    state |= {"streak": np.full(1000, 3), "position": np.array(1000)}
    request = greso.next(state, [], np.random.default_rng(0))
    assert request is not None
    assert len(request.counts) == pytest.approx(125, abs=32)  # three standard deviations
    assert greso.describe(state)["skipped_rate"] == 1 - len(request.counts) / 1000
    assert greso.next(state, [], np.random.default_rng(0)) is None


# --- knapsack


def test_knapsack_shares_out_as_published() -> None:
    rates = np.array([0.0, 0.125, 0.5, 0.875])
    counts = knapsack.share_out(rates, 32, 2, 20)
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
        counts = knapsack.share_out(rates, budget, 2, 8)
        assert counts.sum() == budget
        assert knapsack.worth(rates, np.arange(2, 9))[
            np.arange(3), counts - 2
        ].sum() == pytest.approx(best)


def test_knapsack_learns_from_its_own_groups() -> None:
    rng = np.random.default_rng(0)
    settings = {"smallest": 2, "largest": 20, "discount": 0.5}
    state = knapsack.start(passes(4, 8, 2), BatchSettings("rollouts", 32), **settings)
    first = knapsack.next(state, [], rng)
    assert first is not None
    assert first.counts.tolist() == [8] * 4  # nothing is known yet
    knapsack.observe(
        state, answered(first, [0] * 8 + [1] + [0] * 7 + [1] * 4 + [0] * 4 + [1] * 7 + [0])
    )
    second = knapsack.next(state, [], rng)
    assert second is not None
    assert second.counts[0] == 8  # never solved: the plan's
    assert second.counts.sum() == 32
    assert second.counts[1] == second.counts.max()
    knapsack.observe(state, answered(second, [1.0] * 32))
    np.testing.assert_allclose(state["seen"][:, 0], [8, 8 / 2 + 8])


# --- sagc


def simulate(
    steps: int, seed: int = 0, **changes: Any
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Sizes and straggler rates of steps with lengths drawn from a log-normal of deviation 0.8."""
    state = sagc.start(
        arrays([(0, 16)] * (16 * steps)), BatchSettings("rollouts", 16), **(SAGC | changes)
    )
    rng, sizes, rates = np.random.default_rng(seed), [], []
    for _ in range(steps):
        request = sagc.next(state, [], rng)
        assert request is not None
        assert request.counts.sum() == 16  # a step's rollouts stay what they are
        lengths = np.maximum(np.exp(0.8 * rng.standard_normal(16)) * 200, 1).astype(int)
        sagc.observe(state, answered(request, [0.0] * 16, lengths.tolist()))
        described = sagc.describe(state)
        sizes.append(described["group_size"])
        rates.append(described["straggler_rate"])
    return np.array(sizes), np.array(rates), state


@pytest.mark.parametrize("budget", [0.2, 0.3])
def test_sagc_spends_a_feasible_budget(budget: float) -> None:
    sizes, rates, state = simulate(3000, budget=budget)
    assert rates[500:].mean() == pytest.approx(budget, abs=0.02)
    assert state["multiplier"] < 20.0
    assert set(sizes) == {4.0, 8.0, 16.0}


def test_sagc_says_when_a_budget_is_infeasible() -> None:
    sizes, _, state = simulate(1500, budget=0.05)
    assert (sizes[500:] == 4).mean() > 0.9
    assert 19.0 < float(state["multiplier"]) <= 20.0  # it stands at its cap, and goes no further
    more = simulate(1500, budget=0.3)[0]
    assert more.mean() > simulate(1500, budget=0.2)[0].mean() > sizes.mean()


def test_sagc_without_a_price_takes_the_largest_groups_and_repeats_itself() -> None:
    assert set(simulate(50, step=0.0)[0]) == {16.0}
    assert simulate(80)[0].tolist() == simulate(80)[0].tolist()
    assert simulate(80, seed=1)[0].tolist() != simulate(80)[0].tolist()


def test_sagc_sees_stragglers_in_groups_of_two() -> None:
    straggles = sagc.stragglers(np.array([1, 9, 2, 2]), np.array([0, 0, 1, 1]), 4.0 * 2.0)
    assert straggles.tolist() == [
        True,
        False,
    ]  # against its own median a group of two never reaches 2.0


def test_sagc_never_exceeds_the_plan() -> None:
    state = sagc.start(arrays([(0, 2), (0, 16), (0, 8)]), BatchSettings("rollouts", 100), **SAGC)
    request = sagc.next(state, [], np.random.default_rng(0))
    assert request is not None
    assert request.counts.tolist() == [2, 16, 8]
    with pytest.raises(ParamsError, match="distinct sizes of at least 2"):
        sagc.start(
            arrays([(0, 2)]), BatchSettings("rollouts", 8), **(SAGC | {"group_sizes": [1, 4]})
        )
    with pytest.raises(ParamsError, match="distinct sizes of at least 2"):
        sagc.start(arrays([(0, 2)]), BatchSettings("rollouts", 8), **(SAGC | {"group_sizes": []}))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (greso, GRESO | {"p_max": 1.5}),
        (greso, GRESO | {"floor": -0.1}),
        (sagc, SAGC | {"memory": 1.01}),
        (knapsack, {"smallest": 2, "largest": 8, "discount": -1.0}),
    ],
)
def test_shares_are_checked(method: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match=r"train\.control\.\w+ is .*; it must be from 0 to 1"):
        method.start(passes(4, 2, 1), BatchSettings("rollouts", 8), **settings)
