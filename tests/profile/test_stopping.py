"""Profiles that stop early: the published table, estimates that stopping does not bias, and the
stage itself."""

import shutil
from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from tasks.allocate.planning import load_strategy
from tasks.code.effective import complete
from tasks.common.artifacts import PROFILE, PROMPTS, ROLLOUTS, Layout
from tasks.common.params import ParamsError
from tasks.profile.profile import profile_prompts
from tasks.profile.settings import ProfileSettings, Stop
from tasks.profile.stopping import (
    TRIVIAL,
    UNSOLVED,
    Rule,
    Stopping,
    bucket_of,
    first_success_share,
    is_mixed,
    likely_bucket,
)
from tests.bench.stopping import POSTERIOR, ends, measure, posterior_rules, recorded
from tests.parameters import every_value
from tests.profile.test_profile import rollout
from tests.stages import run_stage
from tests.train.worlds import make_world

PRIORS = {"first": (0.333, 0.67), "last": (0.333, 0.333), "MATH": (0.387, 0.05)}
# rule: (samples, agreement, lost) of the three pools
TABLE: dict[str, list[tuple[float, float, float]]] = {
    "fixed 4": [(4.0, 0.724, 0.222), (4.0, 0.764, 0.210), (4.0, 0.937, 0.161)],
    "mixed": [(5.91, 0.834, 0.0), (6.16, 0.852, 0.0), (7.40, 0.967, 0.0)],
    "unsolved after 4": [(6.21, 0.917, 0.177), (6.72, 0.934, 0.165), (7.77, 0.982, 0.127)],
    "posterior 0.9": [(6.66, 0.964, 0.076), (5.88, 0.957, 0.108), (2.85, 0.976, 0.173)],
    "posterior 0.95": [(7.45, 0.997, 0.006), (7.14, 0.998, 0.006), (2.85, 0.976, 0.173)],
}


def unsolved_after_4(correct: int, graded: int) -> bool:
    return correct == 0 and graded == 4


def rules_of(rule: str, pool: str) -> tuple[list[int], list[Rule]]:
    if rule.startswith("posterior"):
        return [*POSTERIOR, 8], posterior_rules(float(rule.split()[1]), PRIORS[pool])
    return {
        "fixed 4": ([4], []),
        "mixed": ([2, 4, 8], [is_mixed, is_mixed]),
        "unsolved after 4": ([4, 8], [unsolved_after_4]),
    }[rule]


@pytest.mark.real_data
@pytest.mark.parametrize("rule", TABLE)
def test_the_table_of_rules(rule: str, real_data: Path) -> None:
    """On recorded counts, exactly over all orders, with the table's own priors."""
    pools = zip(PRIORS, recorded(real_data / "rollouts").values(), TABLE[rule], strict=True)
    for pool, counts, expected in pools:
        assert measure(counts, *rules_of(rule, pool)) == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(
    ("ends_", "rules", "estimates"),
    [
        ((2,), [is_mixed], {1: 1 / 2}),
        ((2, 4), [is_mixed] * 2, {1: 0, 2: 1 / 2, 3: 1}),
        ((2, 4, 8), [is_mixed] * 2, {0: 0, 1: 0, 3: 0, 4: 1 / 2, 5: 1, 8: 1}),
        ((4, 8), [unsolved_after_4], {1: 1 / 4, 2: 7 / 22, 4: 35 / 69}),
        ((8,), [], {0: 0, 3: 3 / 8, 8: 1}),
        ((0, 2, 2), [is_mixed] * 2, {0: 0, 2: 1}),  # errors only, and errors at the end
    ],
)
def test_estimates_by_hand(
    ends_: tuple[int, ...], rules: list[Rule], estimates: dict[int, float]
) -> None:
    for correct, expected in estimates.items():
        assert first_success_share(correct, ends_, rules) == pytest.approx(expected, abs=1e-12)


def points(stages: list[int], rules: list[Rule], rate: float) -> dict[tuple[int, int], float]:
    """Return the probability of each end (correct, samples) at a true pass rate."""
    found: dict[tuple[int, int], float] = {}
    for whole in range(9):
        weight = comb(8, whole) * rate**whole * (1 - rate) ** (8 - whole)
        for k, n, share in ends(whole, stages, rules):
            found[k, n] = found.get((k, n), 0.0) + weight * share
    return found


@pytest.mark.parametrize("rule", ["mixed", "unsolved after 4", "posterior 0.9"])
def test_the_mean_of_the_estimate_is_the_pass_rate(rule: str) -> None:
    stages, rules = rules_of(rule, "last")
    for rate in (0.1, 0.3, 0.5, 0.9):
        reached = points(stages, rules, rate)
        estimates = {
            (k, n): first_success_share(k, tuple(s for s in stages if s <= n), rules)
            for k, n in reached
        }
        assert sum(reached.values()) == pytest.approx(1.0, abs=1e-12)
        mean = sum(share * estimates[point] for point, share in reached.items())
        assert mean == pytest.approx(rate, abs=1e-9)
        if rule == "mixed":  # the raw rate is biased, and the estimate noisy
            raw = sum(share * k / n for (k, n), share in reached.items())
            biased = {0.1: 0.169, 0.3: 0.375, 0.5: 0.5}
            assert rate not in biased or raw == pytest.approx(biased[rate], abs=5e-4)
        if rule == "mixed" and rate == 0.3:
            squares = sum(share * estimates[point] ** 2 for point, share in reached.items())
            assert np.sqrt(squares - rate**2) == pytest.approx(0.286, abs=5e-4)


def test_buckets_are_the_decisions_of_sgpo() -> None:
    counts = [(k, n) for n in range(1, 17) for k in range(n + 1)]
    table = pl.DataFrame(
        {
            "prompt_id": [f"{k} of {n}" for k, n in counts],
            "correct": [k for k, _ in counts],
            "num_samples": [n for _, n in counts],
        },
        schema_overrides={"correct": pl.Int32, "num_samples": pl.Int32},
    ).with_columns(error=pl.lit(0), pass_rate=pl.col("correct") / pl.col("num_samples"))
    spec = {"strategy": "sgpo", "trivial_above": 0.75, "unsolved_rate": 0.0, "buckets": [2, 4, 8]}
    _, allocate = load_strategy(spec)
    decisions = allocate(table, 1, np.random.default_rng(0)).decisions.sort("row")
    names = {UNSOLVED: "unsolved_dropped", TRIVIAL: "trivial"}
    for (k, n), decision, size in zip(
        counts, decisions["decision"], decisions["group_size"], strict=True
    ):
        bucket = bucket_of(Stop("posterior"), k, n)
        assert (names.get(bucket, "learnable"), max(bucket, 0)) == (decision, size)


def test_open_prompts_by_hand() -> None:
    stopping = Stopping(ProfileSettings(8, Stop("mixed")), 3)
    assert [*stopping.samples] == [0, 1]
    assert stopping.end_stage(np.array([1, 0, 2]), np.array([2, 2, 2]))
    assert (stopping.is_open_P.tolist(), [*stopping.samples]) == ([False, True, True], [2, 3])
    # a prompt that was closed stays closed, whatever its counts
    assert stopping.end_stage(np.array([1, 0, 3]), np.array([1, 4, 4]))
    assert (stopping.is_open_P.tolist(), [*stopping.samples]) == (
        [False, True, False],
        [4, 5, 6, 7],
    )
    assert not stopping.end_stage(np.array([1, 0, 3]), np.array([2, 8, 4]))


def test_a_prompt_without_a_grade_stays_open() -> None:
    stopping = Stopping(ProfileSettings(8, Stop("posterior")), 62)
    correct, graded = np.array([2] * 60 + [1, 0]), np.array([2] * 61 + [0])
    assert stopping.end_stage(correct, graded)
    assert stopping.is_open_P[-1]


def test_equal_counts_of_few_prompts_are_not_certain() -> None:
    for num, is_open in ((1, True), (4, True), (1000, False)):
        stopping = Stopping(ProfileSettings(8, Stop("posterior")), num)
        assert stopping.end_stage(np.zeros(num, np.int64), np.full(num, 2)) == is_open


def test_errors_are_no_samples() -> None:
    """The second prompt has an error in its first stage: one failure alone is not mixed."""
    outcomes = {"a": ["correct", "wrong"], "b": ["error", "wrong", "correct", "error"]}
    rows = [
        rollout(name, n, each) for name, all_ in outcomes.items() for n, each in enumerate(all_)
    ]
    stopping = Stopping(ProfileSettings(8, Stop("mixed")), 2)
    stopping.rules = [is_mixed, is_mixed]
    table = profile_prompts(ROLLOUTS.frame(rows), stopping)
    # of "wrong, correct" and its reverse only the first leaves after the second stage, since the
    # first stage has one graded sample
    assert table["pass_rate"].to_list() == [0.5, 0.5]
    assert table["pass_rate_unbiased"].to_list() == [0.5, 0.5]


def profiled(root: Path, name: str, **settings: Any) -> tuple[pl.DataFrame, pl.DataFrame, str]:
    """Run the stage with these settings, and return its profile, its rollouts and its log."""
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["profile"] = {"num_samples": 8, **settings}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    result = run_stage("profile", path, root)
    assert result.returncode == 0, result.output
    folder = Layout(root).profile
    rollouts = ROLLOUTS.read(folder / "rollouts.parquet")
    return PROFILE.read(folder / "profile.parquet"), rollouts, result.output


@pytest.fixture
def root(guesser: Path, tmp_path: Path) -> Path:
    """A world in which two prompts have the same text, and different golds."""
    root = make_world(tmp_path / "root", guesser, [4, 4]).root
    path = Layout(root).prompts("train")
    prompts = PROMPTS.read(path)
    texts = [*prompts["prompt"][:-1], prompts["prompt"][0]]
    golds = [*prompts["answer"][:-1], "no such number"]
    PROMPTS.write(path, prompts.with_columns(prompt=pl.Series(texts), answer=pl.Series(golds)))
    return root


@pytest.mark.parametrize("stop", [{"rule": "mixed"}, {"rule": "posterior", "confidence": 0.7}])
def test_a_stopped_profile_is_part_of_the_whole_one(root: Path, stop: dict[str, Any]) -> None:
    stopped, rollouts, log = profiled(root, "stopped", stop=stop)
    sizes = stopped["num_samples"]
    assert 12 <= sizes.sum() < 48  # of six prompts
    assert len(rollouts) == sizes.sum()
    if stop["rule"] == "mixed":
        for row in stopped.iter_rows(named=True):
            mixed = 0 < row["correct"] < row["num_samples"]
            assert mixed or row["num_samples"] == 8
    again, same, log = profiled(root, "again", stop=stop)
    assert again.equals(stopped)
    assert same.equals(rollouts)
    assert ", 0 sampled" in log
    whole, every, log = profiled(root, "whole")
    shared = every.join(rollouts, on=["prompt_id", "sample_index"], how="semi")
    assert shared.equals(rollouts)
    assert whole["pass_rate"].equals(whole["pass_rate_unbiased"])
    # prompts of equal text share samples: at most 40 distinct rollouts, of which some are stored
    assert "with fewer than 8 samples in the store" in log
    # and a stopped profile after a whole one samples nothing
    last, same, log = profiled(root, "last", stop=stop)
    assert last.equals(stopped)
    assert same.equals(rollouts)
    assert ", 0 sampled" in log
    fresh = root.parent / "fresh"
    shutil.copytree(root, fresh, ignore=shutil.ignore_patterns("store", "profile"))
    alone, samples, _ = profiled(fresh, "whole")
    assert samples.equals(every)
    assert alone.equals(whole)


def test_costs_are_those_of_the_samples_that_were_drawn(root: Path) -> None:
    stopped, rollouts, _ = profiled(root, "stopped", stop={"rule": "mixed"})
    flops = yaml.safe_load((Layout(root).profile / "flops.json").read_text())
    assert flops["rollouts"]["profile"] == len(rollouts)
    tokens = rollouts["prompt_tokens"].sum() + rollouts["completion_tokens"].sum()
    assert flops["tokens"]["profile"] == tokens
    assert stopped["completion_tokens"].sum() == rollouts["completion_tokens"].sum()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": [4, 2]}, r"profile.stop.stages is \[4, 2\]; it must list increasing numbers"),
        ({"stages": [2, 8]}, "from 1 to 7, below profile.num_samples"),
        ({"stages": [0]}, "from 1 to 7"),
        ({"confidence": 0.0}, "profile.stop.confidence"),
        ({"trivial_above": 1.5}, "profile.stop.trivial_above"),
        ({"buckets": [2, 2]}, "profile.stop.buckets is"),
        ({"rule": "often"}, "profile.stop.rule"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    values = {**every_value(), "experiment": {"recipes": ["sgpo"], "seeds": [0]}}
    stop = {"rule": "mixed", **settings}
    with pytest.raises(ParamsError, match=message):
        complete({**values, "profile": {"num_samples": 8, "stop": stop}})


def test_methods_that_read_whole_groups_refuse_it() -> None:
    values = {**every_value(), "profile": {"num_samples": 8, "stop": {"rule": "mixed"}}}
    for recipe, slot in (("a_star_po", "advantage a_star"), ("profile_replay", "replay profile")):
        with pytest.raises(ParamsError, match=f"profile.stop is set, but train.{slot} needs"):
            complete({**values, "experiment": {"recipes": [recipe], "seeds": [0]}})
    others = {"recipes": ["sgpo", "grpo", "drift"], "seeds": [0]}  # which read counts at most
    assert complete({**values, "experiment": others})["profile"]["stop"]["rule"] == "mixed"


def test_stages_follow_from_the_rule() -> None:
    for (rule, num), expected in {
        ("mixed", 8): [2, 4, 8],
        ("mixed", 16): [2, 4, 8, 16],
        ("mixed", 6): [2, 4, 6],
        ("posterior", 8): [2, 4, 6, 8],
        ("posterior", 2): [2],
    }.items():
        assert ProfileSettings(num, Stop(rule)).stages == expected  # type: ignore[arg-type]
    for num, rule in product((1, 8), (None, Stop("mixed", stages=[]))):
        assert ProfileSettings(num, rule).stages == [num]


def test_a_likely_bucket_by_enumeration() -> None:
    """With a flat prior and 0 of 6, P(no success in two more) = 7/8 * 8/9."""
    stop = Stop("posterior", confidence=7 / 9 - 1e-9)
    assert likely_bucket(stop, 2, (1.0, 1.0))(0, 6)
    assert not likely_bucket(Stop("posterior", confidence=7 / 9 + 1e-9), 2, (1.0, 1.0))(0, 6)
