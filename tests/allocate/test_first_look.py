"""From how many passes on a profile pays: the published table, and sums by hand."""

import numpy as np
import polars as pl
import pytest

from tasks.allocate.first_look import Pass, finite, look_at, passes_to_pay, share_of
from tasks.allocate.planning import load_strategy, make_plan
from tasks.allocate.visits import compare
from tests.allocate.test_allocate import SGPO, profile_of

# a mean group of 3.87 for learnable prompts; their probabilities of a mixed group of 8, and at the
# size of the plan; the share of dead prompts that are unsolved, of which a tenth is kept
SIZE, MIXED_8, MIXED, UNSOLVED, KEPT = 3.87, 0.822, 0.553, 0.69, 0.1
NEVER = np.inf
TABLE = {  # by share of dead prompts: charged and executed, of sGPO and of a filter alone
    0.3: ((0.40, 0.56), (NEVER, NEVER), (0.83, 3.33)),
    0.5: ((0.36, 0.65), (10.7, 43), (0.50, 2.00)),
    0.7: ((0.32, 0.79), (2.6, 10.5), (0.36, 1.43)),
    0.9: ((0.30, 0.99), (1.5, 5.9), (0.28, 1.11)),
}


def one(rollouts: float, mixed: float) -> Pass:
    """A pass of rollouts of one token each, and no prompt."""
    return Pass(*(np.array([value]) for value in (rollouts, mixed, rollouts, mixed)))


PROFILE = one(8, 0)


@pytest.mark.parametrize("dead", TABLE)
def test_the_table_of_passes(dead: float) -> None:
    """Dead prompts have no mixed group; the unsolved ones that are kept get 2 + 4 + 8 rollouts."""
    live = 1 - dead
    uniform = one(8, 8 * live * MIXED_8)
    plan = one(live * SIZE + 14 * KEPT * UNSOLVED * dead, live * SIZE * MIXED)
    filtered = one(8 * live, 8 * live * MIXED_8)
    for number, account in enumerate(("charged", "executed")):
        per_pass, per_mixed = passes_to_pay(account, PROFILE, plan, uniform)
        alone, _ = passes_to_pay(account, PROFILE, filtered, uniform)
        expected = [row[number] for row in TABLE[dead]]
        assert [*per_pass, *per_mixed, *alone] == pytest.approx(expected, rel=0.02)


def test_a_plan_that_is_the_uniform_one_never_pays() -> None:
    for account in ("charged", "executed", "seconds"):
        found = passes_to_pay(account, PROFILE, one(8, 5), one(8, 5), 0.5)
        assert [part[0] for part in found] == [NEVER, NEVER]


def test_seconds_weigh_updates_by_the_ratio_of_speeds() -> None:
    (per_pass,), _ = passes_to_pay("seconds", PROFILE, one(4, 2), one(8, 4), 0.5)
    assert per_pass == pytest.approx(16 / (2 * 4 + 3 * 2))


@pytest.mark.parametrize(
    ("rate", "low", "high"), [(0.3, 0.20, 0.42), (0.5, 0.38, 0.62), (0.7, 0.58, 0.80)]
)
def test_shares_of_64_prompts(rate: float, low: float, high: float) -> None:
    _, *bounds = share_of(round(64 * rate), 64, 10**9)
    assert bounds == pytest.approx([low, high], abs=0.01)
    share, *narrower = share_of(32, 64, 128)
    assert narrower[1] - share == pytest.approx(0.1186 * np.sqrt(64 / 127), abs=1e-3)
    assert share_of(32, 64, 64) == (0.5, 0.5, 0.5)  # all prompts were looked at


def test_a_look_by_hand() -> None:
    """Prompts that are solved half the time, or never: the filter keeps the first. Counts of 2,000
    samples leave no doubt about mixed groups."""
    counts = [(0, 2000)] * 40 + [(1000, 2000)] * 40
    profile = profile_of(counts).with_columns(
        prompt_tokens=pl.lit(5, pl.Int32), completion_tokens=pl.lit(2000 * 10, pl.Int64)
    )
    spec = {"strategy": "band", "trivial_above": 0.9, "group_size": 8}
    _, allocate = load_strategy(spec)
    plan = make_plan(allocate(profile, 3, np.random.default_rng(0)).phases, profile)
    found = look_at(compare(plan, profile), 10**9, 1.0)
    # a rollout of 15 tokens; a group of 8 computes 85, and one of 2,000 samples 20,005
    for account, profiled, saved in (("charged", 30_000, 8 * 120), ("executed", 20_005, 2 * 85)):
        (per_pass, low, high), (per_mixed, *_) = found[account]
        assert per_pass == pytest.approx(2 * 80 * profiled / (40 * saved), rel=0.01)
        assert low < per_pass < high
        # the same mixed groups, so the same saving
        assert per_mixed == pytest.approx(per_pass, rel=0.01)


def test_small_groups_save_rollouts_and_mixed_ones_as_well() -> None:
    profile = profile_of([(k, 8) for k in (0, 0, 0, 1, 2, 4, 4, 5, 8) for _ in range(7)])
    _, allocate = load_strategy(SGPO)
    plan = make_plan(allocate(profile, 2, np.random.default_rng(0)).phases, profile)
    found = look_at(compare(plan, profile), 1000, 1.0)
    for per_pass, per_mixed in found.values():
        assert per_pass[0] < 1.5
        assert per_mixed[0] > per_pass[0]
    assert finite(63, 63) == 0.0
