"""The controls that choose by uncertainty: their published numbers, and their rules by hand."""

import itertools
import json
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.params import ParamsError
from tasks.train.data.plan import Plan
from tasks.train.methods.control import drift, gdro, hora, information, pools, screen, xrpo
from tasks.train.methods.control.pilots import shared
from tasks.train.settings import BatchSettings
from tests.train.steps import after, answer_to, passes_of, requested
from tests.train.test_slots import solved_half

BATCH = BatchSettings("rollouts", 32, "generated")


def outcomes(correct: list[int], sizes: list[int]) -> list[int]:
    pairs = zip(correct, sizes, strict=True)
    return [int(n < k) for k, size in pairs for n in range(size)]


# --- hora


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        (0, [0.167, 0.286, 0.444, 0.615]),
        (1, [0.333, 0.524, 0.722, 0.872]),
        (4, [0.833, 0.952, 0.992, 0.999]),
    ],
)
def test_hora_probabilities_of_a_hit(correct: int, expected: list[float]) -> None:
    found = [hora.hit(more, correct, 4) for more in (1, 2, 4, 8)]
    assert found == pytest.approx(expected, abs=6e-4)


def test_hora_shares_as_published() -> None:
    plan = passes_of(4, 8, 1, BATCH)
    method = hora.Method(hora.Settings(), plan)
    first = requested(method)
    assert first.counts.tolist() == [4] * 4
    pilots = answer_to(first, outcomes([0, 1, 2, 4], [4] * 4))
    second = requested(method, so_far=after(pilots))
    assert second.counts.tolist() == [5, 5, 4, 2]
    assert second.extends is not None
    assert second.extends.tolist() == [0, 1, 2, 3]
    assert method.next(after(pilots, answer_to(second, [0] * 16)), np.random.default_rng()) is None
    assert method.describe() == {"pilot_rate": 0.5}


def test_hora_for_mixed_groups_gives_none_to_those_that_are() -> None:
    method = hora.Method(hora.Settings(utility="mixed"), passes_of(4, 8, 1, BATCH))
    pilots = answer_to(requested(method), outcomes([0, 1, 2, 4], [4] * 4))
    second = requested(method, so_far=after(pilots))
    assert second.extends is not None
    assert second.extends.tolist() == [0, 3]
    assert second.counts.tolist() == [8, 8]  # an unsolved prompt and a solved one are alike


def test_the_greedy_shares_are_optimal() -> None:
    seen = [(0, 4), (1, 4), (3, 4)]

    def gain(q: int, m: int) -> float:
        return hora.hit(m + 1, *seen[q]) - hora.hit(m, *seen[q])

    more = shared(7, np.array([4, 4, 4]), 9, gain)
    best = max(
        (each for each in itertools.product(range(6), repeat=3) if sum(each) == 7),
        key=lambda each: sum(hora.hit(m, *s) for m, s in zip(each, seen, strict=True)),
    )
    assert tuple(more) == best
    assert shared(100, np.array([4, 9]), 9, gain).tolist() == [5, 0]  # the limit
    assert shared(5, np.array([4, 6, 4]), 9, lambda q, m: 0.0).tolist() == [3, 0, 2]  # equal gains


# --- xrpo


@pytest.mark.parametrize(
    ("size", "correct", "width", "gain"),
    [(4, 1, 0.7956, 0.1748), (4, 2, 0.9187, 0.2018), (8, 1, 0.2956, 0.0238), (8, 4, 0.4469, 0.036)],
)
def test_xrpo_intervals_as_published(size: int, correct: int, width: float, gain: float) -> None:
    share = correct / size
    deviation = np.sqrt(share * (1 - share) * size / (size - 1))
    assert xrpo.half_width(size, deviation, 0.95) == pytest.approx(width, abs=5e-5)
    assert xrpo.narrowing(size, deviation, 0.95) == pytest.approx(gain, abs=5e-5)


def test_xrpo_bonus_as_published() -> None:
    """The bonus of groups of equal rewards, among 100 rollouts."""
    plan = passes_of(2, 16, 1, BATCH)
    gain = xrpo.Method(xrpo.Settings(bonus=1.0), plan).gains(np.array([0, 8]), np.array([4, 96]))
    assert gain(0, 0) == pytest.approx(1.0741, abs=5e-5)
    assert gain(0, 4) == pytest.approx(0.7595, abs=5e-5)


def test_xrpo_shares_the_rest_in_rounds() -> None:
    method = xrpo.Method(xrpo.Settings(bonus=0.0), passes_of(3, 8, 1, replace(BATCH, size=24)))
    first = requested(method)
    drawn = [answer_to(first, outcomes([1, 2, 0], [4] * 3))]
    second = requested(method, so_far=after(*drawn))
    assert second.extends is not None
    assert second.counts.sum() == 6
    assert 2 not in second.extends  # equal rewards, and no bonus
    drawn.append(answer_to(second, [0] * 6))
    third = requested(method, so_far=after(*drawn))
    assert third.counts.sum() == 6
    drawn.append(answer_to(third, [0] * 6))
    assert method.next(after(*drawn), np.random.default_rng(0)) is None
    equal = xrpo.Method(xrpo.Settings(), passes_of(4, 8, 1, BATCH))
    pilots = answer_to(requested(equal), outcomes([2] * 4, [4] * 4))
    assert requested(equal, so_far=after(pilots)).counts.tolist() == [2] * 4


def test_pilots_as_large_as_the_groups_are_refused() -> None:
    for module in (hora, xrpo):
        with pytest.raises(ParamsError, match="groups have at most 4 rollouts, and .* is 4"):
            module.Method(module.Settings(), passes_of(4, 4, 1))


# --- screen


@pytest.mark.parametrize(
    ("pilots", "low", "high", "passes"),
    [
        (4, 0.0, 1.0, {0.05: 0.19, 0.125: 0.41, 0.25: 0.68, 0.5: 0.88}),
        (
            *(32, 0.125, 0.75),
            {0.05: 0.074, 0.125: 0.580, 0.25: 0.975, 0.5: 0.999, 0.75: 0.568, 0.9: 0.012},
        ),
    ],
)
def test_the_share_of_prompts_that_pass_the_screen(
    pilots: int, low: float, high: float, passes: dict[float, float]
) -> None:
    """SPEED-RL and Pilot-Commit: the binomial probability of the numbers of successes that pass."""
    num = pilots + 1
    batch = BatchSettings("rollouts", num * pilots, "generated")
    method = screen.Method(screen.Settings(20, low, high), passes_of(num, pilots, 1, batch))
    drawn = answer_to(requested(method), outcomes([*range(num)], [pilots] * num))
    second = requested(method, so_far=after(drawn))
    assert set(second.counts) == {20}
    assert second.extends is not None
    assert method.describe() == {"passed_rate": len(second.counts) / num}
    for rate, expected in passes.items():
        found = sum(
            comb(pilots, k) * rate**k * (1 - rate) ** (pilots - k) for k in second.extends.tolist()
        )
        assert found == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(("rate", "mean"), [(0.125, 0.154), (0.25, 0.269), (0.5, 0.5)])
def test_the_mean_of_a_screened_group_is_biased(rate: float, mean: float) -> None:
    plan = passes_of(5, 4, 1, BatchSettings("rollouts", 20, "generated"))
    method = screen.Method(screen.Settings(), plan)
    drawn = answer_to(requested(method), outcomes([*range(5)], [4] * 5))
    passed = requested(method, so_far=after(drawn)).extends
    assert passed is not None
    weights = {k: comb(4, k) * rate**k * (1 - rate) ** (4 - k) for k in passed.tolist()}
    merged = sum(w * (k + 20 * rate) / 24 for k, w in weights.items()) / sum(weights.values())
    assert merged == pytest.approx(mean, abs=5e-4)


# --- pools


def pools_on(num: int, **settings: Any) -> pools.Method:
    plan = passes_of(num, 2, 50, BatchSettings("rollouts", 8, "generated"))
    return pools.Method(pools.Settings(**settings), plan)


def test_pools_have_their_weights_and_the_retired_only_grow() -> None:
    method = pools_on(4)
    assert method.weights(np.arange(4)).tolist() == [1.0] * 4
    request = replace(requested(method), prompt_rows=np.arange(4))
    method.observe(answer_to(request, [0, 0, 0, 1, 1, 1, 1, 1]))
    assert method.weights(np.arange(4)).tolist() == [0.2, 1.0, 0.2, 0.2]
    method.observe(answer_to(request, [0, 0, 0, 1, 0, 0, 0, 1]))
    assert method.weights(np.arange(4)).tolist() == [0.2, 1.0, 0.2, 1.0]
    assert method.describe() == {"retired_rate": 0.5}
    for seed in range(20):
        assert set(method.choose(4, np.random.default_rng(seed))) == {0, 1}
        # a batch of eight needs the retired ones
        assert set(method.choose(8, np.random.default_rng(seed))) == {0, 1, 2, 3}
    method.observe(answer_to(request, [1] * 8))
    assert len(requested(method).prompt_rows) == 4  # all are retired, so all are drawn


def test_easy_prompts_without_retirement() -> None:
    method = pools_on(4, retire_above=None)
    request = replace(requested(method), prompt_rows=np.arange(4))
    method.observe(answer_to(request, [1] * 8))
    assert method.weights(np.arange(4)).tolist() == [0.2] * 4


def test_pools_of_equal_weights_are_uniform() -> None:
    method = pools_on(8, hard=1.0, easy=1.0, retire_above=None)
    method.state.last[:] = np.linspace(0, 1, 8)
    counts = np.zeros(8)
    for seed in range(400):
        counts[method.choose(2, np.random.default_rng(seed))] += 1
    assert counts.sum() == 400
    assert counts == pytest.approx(np.full(8, 50), abs=25)


# --- drift


def drift_on(plan: Plan, **settings: Any) -> drift.Method:
    return drift.Method(drift.Settings(**settings), plan, solved_half())


def test_drift_begins_from_the_profile_and_forgets() -> None:
    """Each prompt's profile has a correct and a wrong sample."""
    plan = passes_of(20, 8, 4, BATCH)
    method = drift_on(plan, discount=0.5, profile_weight=0.0)
    request = replace(requested(method), prompt_rows=np.arange(4))
    for correct, wrong in ((3.0, 7.0), (4.0, 10.0)):
        method.observe(answer_to(request, outcomes([2] * 4, [8] * 4)))
        if correct == 3.0:  # the prior is 1: 0.5 + 0.5 + 2
            assert (method.state.correct[0], method.state.wrong[0]) == (correct, wrong)
    assert (method.state.correct[0], method.state.wrong[0]) == (4.0, 10.0)
    assert (method.state.correct[5], method.state.wrong[5]) == (1.0, 1.0)
    whole = drift_on(plan)
    assert (whole.state.correct[5], whole.state.wrong[5]) == (2.0, 2.0)
    kept = drift_on(plan, discount=1.0, profile_weight=0.0)
    kept.observe(answer_to(request, outcomes([2] * 4, [8] * 4)))
    kept.observe(answer_to(request, outcomes([2] * 4, [8] * 4), errors=8))
    # counts alone; the errors of the last group count for nothing
    assert (kept.state.correct[0], kept.state.wrong[0]) == (5.0, 13.0)
    assert (kept.state.correct[3], kept.state.wrong[3]) == (3.0, 7.0)


def test_drift_takes_the_prompts_near_the_target() -> None:
    method = drift_on(passes_of(20, 8, 4, BATCH), explore=0.0, candidates=5)
    method.state.correct[:], method.state.wrong[:] = 1.0, 1000.0
    method.state.correct[[3, 7, 11, 12]] = 1000.0
    assert sorted(requested(method).prompt_rows) == [3, 7, 11, 12]
    random = drift_on(passes_of(20, 8, 50, BATCH), explore=1.0)
    random.state.correct[:], random.state.wrong[:] = 1.0, 1000.0
    random.state.correct[:4] = 1000.0
    steps = [requested(random, seed).prompt_rows for seed in range(100)]
    # on average four of the five candidates are taken at random, and are in one order or another
    assert np.mean([row > 3 for rows in steps for row in rows]) == pytest.approx(0.8, abs=0.15)


def test_drift_chooses_by_information_with_the_belief_of_the_profile() -> None:
    """At a cost of 3 the worth is .08 at one fifth, .0625 at one half and .04 at one twentieth."""
    method = drift_on(passes_of(20, 8, 4, BATCH), explore=0.0, candidates=5, choice="information")
    method.state.correct[:], method.state.wrong[:] = 500.0, 500.0
    method.state.correct[:10], method.state.wrong[:10] = 50.0, 950.0
    method.state.correct[[3, 7, 11, 12]], method.state.wrong[[3, 7, 11, 12]] = 200.0, 800.0
    assert sorted(requested(method).prompt_rows) == [3, 7, 11, 12]
    random = drift_on(passes_of(20, 8, 50, BATCH), explore=1.0, choice="information")
    steps = [requested(random, seed).prompt_rows for seed in range(50)]
    assert len({row for rows in steps for row in rows}) == 20
    assert information.worth(np.array([0.2, 0.5, 0.05]), 3.0) == pytest.approx(
        [0.08, 0.0625, 0.0475 * 0.95 / 1.15]
    )


@pytest.mark.real_data
def test_discounted_counts_predict_the_next_epoch_as_published(real_data: Path) -> None:
    """The root mean squared error of the next epoch's share of 8, over 605 recorded histories of a
    training with GRPO in which every prompt is visited in every epoch."""
    history = json.loads((real_data / "rollouts" / "dsr_sub_acc_history.json").read_text())
    errors: dict[str, list[float]] = {name: [] for name in ("profile", "last", "1", "0.8", "0.5")}
    for rates in history.values():
        counts = 8 * np.array(rates)
        errors["profile"] += [*(rates[0] - np.array(rates[1:]))]
        errors["last"] += [*np.diff(rates)]
        for discount in ("1", "0.8", "0.5"):
            settings = drift.Settings(discount=float(discount))
            state = np.ones((2, 1))
            for epoch, correct in enumerate(counts[:-1]):
                state = drift.discounted(state, settings) + [[correct], [8 - correct]]
                predicted = state[0, 0] / state.sum()
                errors[discount].append(predicted - rates[epoch + 1])
    found = {name: np.sqrt(np.mean(np.square(values))) for name, values in errors.items()}
    expected = {"profile": 0.219, "last": 0.161, "1": 0.138, "0.8": 0.125, "0.5": 0.136}
    assert found == pytest.approx(expected, abs=0.0011)


# --- gdro


def test_gdro_counts_are_as_published() -> None:
    """Groups of 4 on average; a thousand times as many show three digits before rounding."""
    rates = np.array([0.5, 0.25, 0.125, 0.95])
    found = gdro.Method.best_counts(rates, 16_000, 1, 12_000) / 1000
    assert found == pytest.approx([5.399, 4.676, 3.572, 2.353], abs=1.1e-3)
    assert gdro.Method.best_counts(rates, 16, 2, 12).tolist() == [5, 5, 4, 2]
    assert gdro.Method.best_counts(np.array([0, 0.5, 1]), 18, 2, 12).tolist() == [3, 12, 3]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=9), st.data())
def test_gdro_keeps_the_sum_and_the_bounds(correct: list[int], data: st.DataObject) -> None:
    num, rates = len(correct), np.array(correct) / 8
    budget = data.draw(st.integers(2 * num, 12 * num))
    counts = gdro.Method.best_counts(rates, budget, 2, 12)
    assert counts.sum() == budget
    assert set(counts) <= {*range(2, 13)}
    order = np.argsort(rates * (1 - rates), kind="stable")
    assert (np.diff(counts[order]) >= -1).all()  # equal ones differ by one at most
    assert np.ptp(gdro.Method.best_counts(np.full(num, rates[0]), 4 * num, 2, 12)) == 0


def test_gdro_redistributes_among_prompts_with_a_bin() -> None:
    plan = passes_of(5, 8, 2, replace(BATCH, size=40))
    method, equal = (gdro.Method(gdro.Settings(), plan) for _ in range(2))
    first = requested(method)
    assert first.counts.tolist() == [8] * 5
    method.observe(answer_to(first, outcomes([0, 1, 4, 8, 0], [8] * 5), errors=8))
    assert method.state.bins.tolist() == [0, 1, 5, 9, -1]  # the last has no graded rollout
    assert requested(method).counts.tolist() == [4, 12, 12, 4, 8]
    equal.observe(answer_to(first, outcomes([2] * 5, [8] * 5)))
    assert requested(equal).counts.tolist() == [8] * 5
    before = equal.state.rates.copy()
    equal.observe(answer_to(first, errors=40))
    assert (equal.state.rates == before).all()
    equal.state.bins[:2], equal.state.rates[:2] = 9, [0.92, 0.98]  # a bin has the mean rate, 0.95
    assert equal.rates(np.arange(3)) == pytest.approx([0.95, 0.95, 0.25])
