"""Policies compared prompt by prompt: significance despite overlapping intervals, and seeds."""

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import ROLLOUTS, Layout
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError
from tasks.common.params import Experiment
from tasks.common.statistics import bootstrap_interval
from tasks.report.evidence import read_evidence
from tasks.report.paired import Paired, difference, is_apart, pair
from tasks.report.views.tables import text_table
from tests.report.conftest import INITIAL, NUM_TEST, metrics, results, write_answers

ONE_SEED = Experiment(["grpo", "sgpo"], [0])
# half of the 256 prompts are hard and half are easy, as in a real test set: 2 or 6 of 8 correct
FIRST = [2, 6] * (NUM_TEST // 2)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def changed(counts: dict[int, int]) -> list[int]:
    """Return the correct samples of a policy that solves so many prompts so much more often."""
    more = np.repeat(list(counts), list(counts.values()))
    return list(np.array(FIRST) + np.pad(more, (0, NUM_TEST - len(more))))


def set_answers(layout: Layout, recipe: str | None, correct: list[int]) -> tuple[float, float]:
    """Let a policy solve these prompts; return the interval of its own pass@1."""
    rates = np.array(correct) / 8
    low, high = bootstrap_interval(rates, 1000, rng())
    folder = layout.evaluation(recipe, 0) if recipe else layout.baseline
    policy = f"{recipe}-0" if recipe else INITIAL
    interval = {"pass_at_1_low": low, "pass_at_1_high": high}
    write_checked(folder / "metrics.json", {**metrics(float(rates.mean()), policy), **interval})
    write_answers(folder, correct)
    return low, high


def test_a_paired_interval_is_narrower_than_two_separate_ones(layout: Layout) -> None:
    """121 more of 2,048 samples: 5.9 points, 95 % [3.9, 7.9], and the intervals overlap."""
    grpo = set_answers(layout, "grpo", FIRST)
    sgpo = set_answers(layout, "sgpo", changed({2: 80, 1: 37, -1: 16, -2: 30}))
    assert sgpo[0] < grpo[1]
    measured = results(layout, seeds=[0], num_bootstrap=2000)
    found = difference(measured.paired, ["sgpo/0"], ["grpo/0"])
    values = (found["mean"], found["low"], found["high"])
    assert values == pytest.approx((0.0591, 0.039, 0.079), abs=0.0015)
    assert is_apart(found)
    assert (found["num_prompts"], found["over"]) == (256, "prompts")
    assert measured.summary["recipes"]["sgpo"]["differences"]["reference"] == found
    words = text_table(measured)
    assert "(95 % intervals are over prompts)" in words
    assert "+5.9 (+3.9 to +7.8)" in words


def test_the_champion_is_confirmed_by_the_paired_difference(layout: Layout) -> None:
    """It is 2.9 points above the initial policy, whose pass@1 is within its own interval."""
    set_answers(layout, None, FIRST)
    low, _ = set_answers(layout, "sgpo", changed({1: 100, -1: 40}))
    assert low < np.mean(FIRST) / 8
    summary = results(layout, seeds=[0], num_bootstrap=1000).summary
    assert (summary["champion"]["recipe"], summary["champion"]["seed"]) == ("sgpo", 0)
    assert "+2.9 points against the initial policy (paired over 256 prompts" in summary["why"]


def test_the_reference_is_grpo_in_any_order(finished: Layout) -> None:
    found = results(finished, ["sgpo", "grpo"], num_bootstrap=100)
    summary = found.summary
    assert (summary["reference"], summary["champion"]["recipe"]) == ("grpo", "sgpo")
    grpo, sgpo = (summary["recipes"][name]["differences"] for name in ("grpo", "sgpo"))
    assert grpo["reference"] is None
    assert sgpo["champion"] is None, "its seeds against one of them"
    assert grpo["champion"]["mean"] == pytest.approx(0.52 - 0.55, abs=1e-3)
    assert sgpo["reference"]["mean"] == pytest.approx(0.53 - 0.52, abs=1e-3)
    assert sgpo["initial"]["mean"] == pytest.approx(0.53 - 0.40, abs=1e-3)
    assert sgpo["initial"]["over"] == "seeds and prompts"
    lines = text_table(found).splitlines()
    assert any("95 % intervals are over seeds and prompts" in line for line in lines)


def test_seeds_are_paired() -> None:
    """The second is 0.1 better on every prompt of each seed, while seeds differ by 0.5. Against a
    single policy this spread counts."""
    seeds_PS = np.tile([0.2, 0.7], (20, 1))
    table = pl.DataFrame({"prompt_id": [f"t{index}" for index in range(20)]}).with_columns(
        pl.Series("a/0", seeds_PS[:, 0]),
        pl.Series("a/1", seeds_PS[:, 1]),
        pl.Series("b/0", seeds_PS[:, 0] + 0.1),
        pl.Series("b/1", seeds_PS[:, 1] + 0.1),
    )
    paired = Paired(table.with_columns(pl.lit(0.2).alias("initial")), 400)
    by_seed = difference(paired, ["b/0", "b/1"], ["a/0", "a/1"])
    # all 20 prompts are equal: up to 16.1 % may differ (`equal_interval`)
    expected = (0.1, 0.1 - 0.1611 * 1.1, 0.1 + 0.1611 * 0.9)
    found = (by_seed["mean"], by_seed["low"], by_seed["high"])
    assert found == pytest.approx(expected, abs=1e-4)
    over = difference(paired, ["b/0", "b/1"], ["initial"])
    # two seeds 0.5 apart: one degree of freedom, 0.25 * 12.7 exceeds the bounds
    assert (over["mean"], over["low"], over["high"]) == pytest.approx((0.35, -1.0, 1.0), abs=1e-3)


def test_ungraded_prompts_are_excluded() -> None:
    one = Paired(pl.DataFrame({"prompt_id": ["t"], "a": [1.0], "b": [0.5], "c": [0.0]}), 50)
    lonely = difference(one, ["a", "b"], ["c"])  # an interval over seeds needs several prompts
    assert lonely["over"] == "prompts"
    assert lonely["low"] <= lonely["mean"] == 0.75 <= lonely["high"]
    rates = {"prompt_id": ["t0", "t1", "t2"], "a/0": [1.0, None, 0.5], "b/0": [0.0, 1.0, 0.5]}
    found = difference(Paired(pl.DataFrame(rates), 50), ["a/0"], ["b/0"])
    assert (found["mean"], found["num_prompts"]) == (0.5, 2)
    with pytest.raises(ArtifactError, match="no test prompt was graded for all of a/0, b/0"):
        difference(Paired(pl.DataFrame(rates)[1:2], 50), ["a/0"], ["b/0"])


def test_errors_are_not_wrong_answers(layout: Layout) -> None:
    path = layout.evaluation("sgpo", 0) / "rollouts.parquet"
    first = (pl.col("prompt_id") == "t0") & ~pl.col("greedy")
    outcome = pl.when(first).then(pl.lit("error")).otherwise("outcome").alias("outcome")
    ROLLOUTS.write(path, ROLLOUTS.read(path).with_columns(outcome))
    rates = pair(read_evidence(layout, ONE_SEED), 10).rates
    assert (rates["sgpo/0"].null_count(), rates["grpo/0"].null_count()) == (1, 0)


def test_other_test_prompts_are_refused(layout: Layout) -> None:
    write_answers(layout.evaluation("sgpo", 0), [4] * (NUM_TEST + 1))
    evidence = read_evidence(layout, ONE_SEED)
    with pytest.raises(ArtifactError, match="sgpo/0 was evaluated on other test prompts"):
        pair(evidence, 10)


@pytest.mark.parametrize("mine", [["b/0"], ["b/0", "b/1"]])
def test_equal_differences_need_as_many_prompts_as_their_interval_states(mine: list[str]) -> None:
    """Of n prompts up to z**2 / (n + z**2) may differ: .01 from 99 * 1.96**2 = 380.3 prompts on."""
    table = pl.DataFrame({"prompt_id": [f"t{index}" for index in range(20)]})
    columns = {name: pl.lit(0.3) for name in ("a/0", "a/1", "b/0", "b/1")}
    other = [name.replace("b", "a") for name in mine]
    found = difference(Paired(table.with_columns(**columns), 50), mine, other)
    assert found["times"] == pytest.approx(380.3 / 20, rel=1e-4)
