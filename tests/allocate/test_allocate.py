"""sGPO's rule against the paper's figures, and properties of every strategy."""

from dataclasses import asdict

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.allocate import strategies
from tasks.allocate.forecast import forecast
from tasks.allocate.planning import (
    Allocation,
    EmptyPlanError,
    check_decisions,
    load_strategy,
    make_plan,
)
from tasks.allocate.visits import compare
from tasks.common.accounting.ledger import Architecture
from tasks.common.artifacts import PROFILE
from tasks.common.params import ParamsError
from tasks.common.registry import names
from tasks.train import needs
from tasks.train.loading import settings_of
from tasks.train.settings import TrainSettings, WarmStart
from tests.report.conftest import profile_of as named_profile

SGPO = {"strategy": "sgpo", "trivial_above": 0.75, "unsolved_rate": 0.1, "buckets": [2, 4, 8]}
MATCHED = {name: value for name, value in SGPO.items() if name != "strategy"} | {"group_size": 8}
SPECS = {
    "sgpo": SGPO,
    "uniform": {"strategy": "uniform", "group_size": 8},
    "sgpo_unsorted": {**SGPO, "strategy": "sgpo_unsorted"},
    "band": {"strategy": "band", "trivial_above": 0.75, "group_size": 16},
    "grpo_matched": {"strategy": "grpo_matched", **MATCHED},
    "random_subset": {"strategy": "random_subset", **MATCHED},
}

# the decisions on prompts solved 0 to 8 times of 8
BY_SOLVED = ["unsolved_dropped", *["learnable"] * 6, "trivial", "trivial"]
ALL, MIXED = {"method": "all"}, {"method": "mixed"}
ARCHITECTURE = Architecture(
    num_matmul_parameters=10, num_head_parameters=2, num_layers=1, attention_width=4
)


def train_of(select: dict[str, object], **changes: object) -> TrainSettings:
    """Return a recipe's section `train` with these keys."""
    return needs.read_train({"select": select, **changes})


def profile_of(counts: list[tuple[int, int]]) -> pl.DataFrame:
    """Return a PROFILE table of (correct, samples) pairs; names of prompts are their places."""
    places = enumerate(counts)
    return named_profile(
        {f"p{place:05d}": (right, samples - right, 0) for place, (right, samples) in places}
    )


def run(
    spec: dict[str, object], profile: pl.DataFrame, passes: int = 2, seed: int = 0
) -> tuple[Allocation, pl.DataFrame]:
    allocation = load_strategy(spec)[1](profile, passes, np.random.default_rng(seed))
    return allocation, make_plan(allocation.phases, profile)


def forecast_of(
    profile: pl.DataFrame, train: TrainSettings, passes: int = 2, reads_profile: bool = False
) -> dict[str, dict[str, float]]:
    """Return the forecast of uniform groups of four."""
    _, plan = run({"strategy": "uniform", "group_size": 4}, profile, passes)
    return forecast(
        compare(plan, profile),
        ARCHITECTURE,
        reads_profile=reads_profile,
        strategy="uniform",
        train=train,
    )


def test_every_strategy_is_tested_here() -> None:
    assert set(SPECS) == set(names(strategies))


def test_bucket_of_k_of_8() -> None:
    allocation, _ = run(SGPO, profile_of([(k, 8) for k in range(9)]))
    decisions = check_decisions(allocation.decisions, profile_of([(k, 8) for k in range(9)]))
    assert decisions["group_size"].to_list()[1:] == [8, 4, 2, 2, 2, 2, 0, 0]
    assert decisions["decision"].to_list() == BY_SOLVED


@pytest.mark.parametrize(
    ("correct", "samples", "buckets", "size", "words"),
    [
        (1, 16, [2, 4, 8, 16], 16, "at most one success in 16 expected"),
        (1, 3, [2, 4, 8], 2, "fewer than 4 rollouts"),
        (2, 5, [3, 5], 3, "fewer than 5 rollouts"),
        (6, 8, [8], 8, "solved 6 of 8; the only group size: groups of 8"),
    ],
)
def test_other_sample_counts_and_buckets(
    correct: int, samples: int, buckets: list[int], size: int, words: str
) -> None:
    decisions = run({**SGPO, "buckets": buckets}, profile_of([(correct, samples)]))[0].decisions
    assert decisions["group_size"].to_list() == [size]
    assert words in decisions["reason"][0]


def test_the_papers_cluster_sizes_reproduce_its_figures() -> None:
    """arXiv 2606.08854, 7B: |C2| 3,857, |C4| 1,587, |C8| 2,081, trivial 1,285, unsolved 5,306 of
    14,116."""
    profile = profile_of(
        [(4, 8)] * 3857 + [(2, 8)] * 1587 + [(1, 8)] * 2081 + [(8, 8)] * 1285 + [(0, 8)] * 5306
    )
    allocation, plan = run(SGPO, profile, passes=1)
    learnable = allocation.decisions.filter(pl.col("decision") == "learnable")
    assert len(learnable) == 7_525
    assert learnable["group_size"].mean() == pytest.approx(4.08, abs=0.005)
    assert (allocation.decisions["decision"] == "unsolved_kept").sum() == 531
    assert plan["group_size"].sum() == 38_144


counts = st.lists(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    min_size=1,
    max_size=40,
)


@given(counts, st.integers(0, 5), st.integers(1, 3))
def test_properties_of_sgpo_on_any_profile(
    pairs: list[tuple[int, int]], seed: int, passes: int
) -> None:
    profile = profile_of(pairs)
    allocation = load_strategy(SGPO)[1](profile, passes, np.random.default_rng(seed))
    decisions = check_decisions(allocation.decisions, profile)
    by_decision = {
        key: set(ids) for key, ids in decisions.group_by("decision").agg("prompt_id").iter_rows()
    }
    kept = by_decision.get("unsolved_kept", set())
    solved_never = {f"p{i:05d}" for i, (correct, _) in enumerate(pairs) if correct == 0}
    assert kept | by_decision.get("unsolved_dropped", set()) == solved_never
    assert len(kept) == round(0.1 * len(solved_never))
    sizes = dict(decisions.select("prompt_id", "group_size").iter_rows())
    for number, frame in enumerate(allocation.phases):
        expected = [2, 4, 8][number % 3]
        ids = profile["prompt_id"].gather(frame["row"]).to_list()
        assert set(frame["group_size"]) <= {expected}
        assert len(ids) == len(set(ids))
        assert kept <= set(ids)  # the same unsolved prompts in every phase
        assert all(sizes[name] == expected for name in set(ids) - kept)
        assert not set(ids) & by_decision.get("trivial", set())
    per_pass = [
        sorted(pl.concat(allocation.phases[i * 3 : i * 3 + 3])["row"]) for i in range(passes)
    ]
    assert all(ids == per_pass[0] for ids in per_pass)


def test_uniform_visits_every_prompt_once_per_pass() -> None:
    profile = profile_of([(k % 9, 8) for k in range(50)])
    _, plan = run(SPECS["uniform"], profile, passes=3)
    assert plan.group_by("prompt_id").len()["len"].to_list() == [3] * 50
    assert plan["phase"].to_list() == [0] * 50 + [1] * 50 + [2] * 50
    orders = [plan.filter(pl.col("pass") == number)["prompt_id"].to_list() for number in range(3)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_same_seed_same_plan(name: str) -> None:
    profile = profile_of([(k % 9, 8) for k in range(60)])
    assert run(SPECS[name], profile, seed=3)[1].equals(run(SPECS[name], profile, seed=3)[1])
    assert not run(SPECS[name], profile, seed=3)[1].equals(run(SPECS[name], profile, seed=4)[1])


def test_the_band_has_the_partly_solved_prompts() -> None:
    allocation, plan = run(SPECS["band"], profile_of([(k, 8) for k in range(9)]))
    assert sorted(plan["prompt_id"].unique()) == [f"p{k:05d}" for k in range(1, 7)]
    assert plan["group_size"].unique().to_list() == [16]
    decisions = check_decisions(allocation.decisions, profile_of([(k, 8) for k in range(9)]))
    assert decisions["decision"].to_list() == BY_SOLVED


def test_unsorted_is_sgpo_in_another_order() -> None:
    profile = profile_of([(k % 9, 8) for k in range(300)])
    ordered, mixed = run(SGPO, profile)[1], run(SPECS["sgpo_unsorted"], profile)[1]
    visits = ["pass", "prompt_id", "group_size"]
    assert mixed.select(visits).sort(visits).equals(ordered.select(visits).sort(visits))
    assert mixed["phase"].n_unique() == 2
    first = mixed.filter(pl.col("pass") == 0)["group_size"]
    assert not first.is_sorted()


@pytest.mark.parametrize("name", ["grpo_matched", "random_subset"])
def test_a_matched_plan_costs_as_much_as_sgpos(name: str) -> None:
    rng = np.random.default_rng(3)
    profile = profile_of([(int(k), 8) for k in rng.integers(0, 9, 400)]).with_columns(
        completion_tokens=pl.Series(rng.integers(50, 900, 400)),
        prompt_tokens=pl.Series(rng.integers(5, 60, 400)),
    )
    profile = PROFILE.frame(profile.to_dicts())
    architecture = Architecture(1000, 10, 2, 8)
    ours, theirs = (
        forecast(
            compare(run(spec, profile)[1], profile),
            architecture,
            reads_profile=spec is SGPO,
            strategy=str(spec["strategy"]),
            train=train_of(ALL),
        )["plan"]["flops_charged"]
        for spec in (SPECS[name], SGPO)
    )
    assert ours == pytest.approx(theirs, rel=0.01)  # to a visit, and the head's share
    # the cost of eight passes of sGPO, more than one uniform pass
    plan = run(SPECS[name], profile, passes=8)[1]
    subset = run(SGPO, profile, passes=8)[1]["prompt_id"].n_unique()
    assert plan["prompt_id"].n_unique() == (subset if name == "random_subset" else 400)
    assert (plan["pass"] == 0).sum() == plan["prompt_id"].n_unique()


def test_an_ungraded_prompt_is_excluded() -> None:
    profile = profile_of([(4, 8), (0, 8)])
    broken = profile.with_columns(
        pass_rate=pl.when(pl.col("prompt_id") == "p00001").then(None).otherwise("pass_rate"),
        error=pl.when(pl.col("prompt_id") == "p00001").then(8).otherwise(0).cast(pl.Int32),
    )
    allocation, plan = run(SGPO, broken)
    assert check_decisions(allocation.decisions, broken)["decision"].to_list()[1] == "ungraded"
    assert set(plan["prompt_id"]) == {"p00000"}


def test_an_empty_plan_is_an_error_with_the_histogram() -> None:
    with pytest.raises(EmptyPlanError, match=r"1\.000: 3, .*|0\.000: 4, 1\.000: 3"):
        run({**SGPO, "unsolved_rate": 0.0}, profile_of([(8, 8)] * 3 + [(0, 8)] * 4))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"strategy": "sgop"},
            "allocate.strategy is 'sgop'; use: band, grpo_matched, random_subset, sgpo, "
            "sgpo_unsorted, uniform",
        ),
        ({"strategy": "uniform"}, r"allocate.group_size is missing"),
        (
            {"strategy": "uniform", "group_size": 8, "size": 1},
            r"allocate.size is unknown; allowed: group_size",
        ),
        ({"strategy": "uniform", "group_size": 0}, r"allocate.group_size is 0; .* at least 1"),
        ({**SGPO, "buckets": []}, r"allocate.buckets is \[\]; it must list distinct group sizes"),
        ({**SGPO, "buckets": [4, 4]}, r"allocate.buckets is \[4, 4\]"),
        (
            {**SGPO, "unsolved_rate": 1.5, "trivial_above": -0.1},
            r"allocate.trivial_above is -0.1; .*\n.*allocate.unsolved_rate is 1.5; .* from 0 to 1",
        ),
    ],
)
def test_a_recipes_strategy_is_checked_before_it_reads_a_profile(
    spec: dict[str, object], message: str
) -> None:
    with pytest.raises(ParamsError, match=message):
        load_strategy(spec)


def test_forecast_by_hand() -> None:
    profile = profile_of([(4, 8)] * 5)  # 9 prompt tokens and 96 / 8 completion tokens a sample: 21
    expected = forecast_of(profile, train_of(ALL))
    assert expected["plan"]["rollouts"] == 40
    assert expected["plan"]["tokens"] == 40 * 21
    assert expected["plan"]["flops_charged"] == 8 * 10 * 40 * 21
    assert expected["plan"]["flops_charged_paper"] == 8 * 10 * 40 * 21
    assert expected["uniform"] == {**expected["plan"], "group_size": 4}
    reading = forecast_of(profile, train_of(ALL), reads_profile=True)
    assert reading["plan"]["flops_charged"] == 8 * 10 * 40 * 21 + 2 * 10 * 5 * 8 * 21


def test_the_forecast_charges_updates_of_kept_rollouts() -> None:
    profile = profile_of([(4, 8)] * 5 + [(0, 8)] * 5)
    selects: tuple[dict[str, object], ...] = (ALL, {"method": "pods", "keep": 2}, MIXED)
    everything, pairs, mixed = (
        forecast_of(profile, train_of(select), passes=1)["plan"] for select in selects
    )
    assert everything["tokens"] == pairs["tokens"] == mixed["tokens"] == 40 * 21
    assert everything["tokens_updated"] == 40 * 21
    assert pairs["tokens_updated"] == 20 * 21
    assert pairs["flops_charged"] == 2 * 10 * 40 * 21 + 6 * 10 * 20 * 21
    # all groups have one size, so their tokens are proportional to their number
    assert mixed["tokens_updated"] == pytest.approx(mixed["mixed_groups"] * 4 * 21)
    assert mixed["flops_charged"] == pytest.approx(mixed["flops_charged_mixed"])
    assert mixed["flops_charged_mixed"] == pytest.approx(everything["flops_charged_mixed"])
    assert mixed["flops_charged"] < everything["flops_charged"]
    read = forecast_of(profile, train_of(selects[1], kl_coefficient=0.1), passes=1)["plan"]
    assert read["flops_charged"] == read["flops_charged_mixed"] == pairs["flops_charged"] + 8_400
    assert read["flops_charged_paper"] == 12 * 10 * 40 * 21
    select = {"method": "pods", "keep": 2, "drop_dead": True}
    alive = forecast_of(profile, train_of(select), passes=1)["plan"]
    assert alive["tokens_updated"] == pytest.approx(alive["mixed_groups"] * 2 * 21)
    assert alive["flops_charged"] == pytest.approx(alive["flops_charged_mixed"])
    assert alive["flops_charged_mixed"] == pytest.approx(pairs["flops_charged_mixed"])


def test_the_forecast_charges_every_epoch_replay_and_old_log_probabilities() -> None:
    updates = {"epochs": 2, "minibatches": 3}
    replay = {"method": "recent", "share": 0.2, "capacity": 9}
    train = train_of(ALL, updates=updates, replay=replay)
    found = forecast_of(profile_of([(4, 8)] * 5), train)["plan"]
    tokens = 40 * 21  # 0.8 of a step
    assert found["tokens_updated"] == pytest.approx(2 * tokens / 0.8)
    scored = 2 * 10 * tokens / 0.8
    assert found["flops_charged"] == pytest.approx(
        2 * 10 * tokens + 6 * 10 * 2 * tokens / 0.8 + scored
    )
    correction = {"m2po": 0.04, "proximal": {"method": "ewma"}}
    both = train_of(ALL, correction=correction, max_staleness=1)
    assert forecast_of(profile_of([(4, 8)] * 5), both)["plan"]["flops_charged"] == 120 * tokens


@pytest.mark.parametrize("method", ["recent", "profile", "coverage"])
def test_the_forecast_counts_a_replay_with_default_settings(method: str) -> None:
    profile = profile_of([(4, 8)] * 5)
    short = {"method": method}
    whole = settings_of({"replay": short}).replay
    assert whole["share"] == 0.5
    one, other = (forecast_of(profile, train_of(ALL, replay=replay)) for replay in (short, whole))
    assert one == other


def test_slots_that_read_the_profile_are_found_without_imports() -> None:
    train = train_of(ALL, replay={"method": "profile", "share": 0.5, "capacity": 4})
    assert needs.profile_readers(train) == ["replay"]
    assert needs.profile_readers(train_of(ALL, replay={"method": "recent"})) == []
    assert needs.profile_readers(train_of({"method": "no_such_selector"})) == []
    for data, found in (("profile", ["warm_start"]), ("solutions", [])):
        warm = asdict(WarmStart(data=data))
        assert needs.profile_readers(train_of(ALL, warm_start=warm)) == found
