"""The report on a pipeline written by hand (`conftest`): totals by hand, honest words, one
self-contained page."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError
from tasks.common.params import Experiment
from tasks.common.sealed import read_sealed, write_sealed
from tasks.report.charts import flops_words, unit
from tasks.report.evidence import Evidence, read_evidence
from tasks.report.leaderboard import Row, curve_table, fit_curves, leaderboard, summarise
from tasks.report.origin import Origin
from tasks.report.page import page
from tasks.report.paired import pair
from tasks.report.run import measure
from tasks.report.settings import ReportSettings
from tasks.report.tables import text_table
from tasks.report.words import verdict
from tests.report.conftest import write_params, write_plans, write_training
from tests.stages import run_stage

BOTH = Experiment(["grpo", "sgpo"], [0, 1])


@pytest.fixture
def evidence(layout: Layout) -> Evidence:
    return read_evidence(layout, BOTH)


def row(rows: list[dict[str, Any]], recipe: str, seed: int) -> dict[str, Any]:
    return next(row for row in rows if (row["recipe"], row["seed"]) == (recipe, seed))


def rows_of(evidence: Evidence) -> list[Row]:
    return leaderboard(evidence, pair(evidence, 200))


def summary_of(evidence: Evidence) -> dict[str, Any]:
    paired, fits = pair(evidence, 200), fit_curves(evidence, 200)
    return summarise(evidence, rows_of(evidence), paired, fits)


def page_of(evidence: Evidence) -> str:
    drifts = measure(evidence, ReportSettings(stale_above=0.15, num_bootstrap=200))
    summary = {**summary_of(evidence), "drift": drifts}
    fits = fit_curves(evidence, 200)
    rows, paired = rows_of(evidence), pair(evidence, 200)
    none = {"runs": [], "changes": [], "total": 0, "prompts": []}
    made = Origin({}, [], [])
    return page(evidence, rows, summary, curve_table(evidence), fits, paired, none, made)


def data_of(html: str) -> dict[str, Any]:
    """What the page's scripts draw."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return dict(json.loads(text))


def test_profiling_is_charged_only_where_it_is_read(evidence: Evidence) -> None:
    rows = rows_of(evidence)
    without = {"profile": 0.0, "generate": 300e9, "score": 0.0, "update": 600e9, "total": 900e9}
    assert row(rows, "grpo", 0)["flops_charged"] == without
    assert row(rows, "sgpo", 0)["flops_charged"] == pytest.approx(
        {"profile": 100e9, "generate": 100e9, "score": 0.0, "update": 200e9, "total": 400e9}
    )
    assert row(rows, "sgpo", 0)["flops_charged_paper"]["total"] == pytest.approx(
        100e9 + 100e9 + 300e9
    )
    assert row(rows, "grpo", 0)["tokens_profile"] == 0
    assert row(rows, "sgpo", 0)["tokens_profile"] == 5000


def test_recipes_are_compared_in_every_account(evidence: Evidence) -> None:
    """The page's tables, the summary and the leaderboard name the accounts alike."""
    rows = rows_of(evidence)
    for account, grpo, sgpo in (("charged", 900, 400), ("charged_mixed", 750, 340)):
        assert row(rows, "grpo", 0)[f"flops_{account}"]["total"] == grpo * 1e9
        assert row(rows, "sgpo", 0)[f"flops_{account}"]["total"] == pytest.approx(sgpo * 1e9)
        recipes = summary_of(evidence)["recipes"]
        assert recipes["grpo"][f"flops_{account}"]["mean"] == grpo * 1e9
    html = page_of(evidence)
    heads = re.findall(r"<thead><tr>(.*?)</tr>", html.partition("<script>")[0])
    compared = [head for head in heads if "charged" in head and "executed" in head]
    assert len(compared) == 3, "the leaderboard, over the seeds, and to an accuracy"
    assert all("charged_mixed" in head for head in compared)
    accounts = ["charged", "charged_mixed", "executed", "charged_paper"]
    bills = html.partition("Where the compute went")[2]
    assert re.findall(r"</td><td>((?:charged|executed)\w*)</td>", bills) == accounts * 4
    charts = data_of(html)["charts"]
    assert [one["name"] for one in charts["parts"]["variants"]] == accounts[:3]
    assert all(f"{account} compute, GFLOPs" in html for account in accounts[:3])


def test_leaving_dead_groups_out_makes_no_recipe_win(layout: Layout) -> None:
    """The same weights for a smaller bill in `charged`, and the same one in `charged_mixed`."""
    write_plans(layout, "grpo_mixed", reads_profile=False)
    write_training(layout, "grpo_mixed", 0, scale=1.0, validation=0.52, test=0.50)
    path = layout.train("grpo_mixed", 0) / "flops.json"
    flops = read_sealed(path)
    flops["charged"] = flops["charged_mixed"]
    write_sealed(path, flops)
    evidence = read_evidence(layout, Experiment(["grpo", "grpo_mixed"], [0]))
    assert [row["recipe"] for row in rows_of(evidence)] == ["grpo", "grpo_mixed"]
    summary = summary_of(evidence)
    assert summary["champion"]["recipe"] == "grpo"
    words = verdict(summary)
    assert "it takes 1.2 times less charged, as much charged_mixed and as much executed" in words


def test_lost_work_is_executed_but_not_charged_and_validation_is_in_no_total(
    evidence: Evidence,
) -> None:
    grpo = row(rows_of(evidence), "grpo", 0)
    assert grpo["flops_executed"] == {
        "profile": 0.0,
        "generate": 200e9,
        "score": 0.0,
        "update": 400e9,
        "lost": 30e9,
        "total": 630e9,
    }
    assert "lost" not in grpo["flops_charged"]
    assert grpo["flops_validation"] == 50e9
    assert row(rows_of(evidence), "sgpo", 1)["flops_executed"]["total"] == pytest.approx(
        (80 + 200 + 30) * 1e9
    )


def test_seconds_and_counts(evidence: Evidence) -> None:
    rows = rows_of(evidence)
    assert row(rows, "grpo", 1)["seconds"] == {
        "profile": 0.0,
        "train": 60.0,
        "lost": 2.0,
        "total": 62.0,
    }
    assert row(rows, "sgpo", 1)["seconds"] == pytest.approx(
        {"profile": 6, "train": 20, "lost": 2, "total": 28}
    )
    assert (row(rows, "grpo", 0)["rollouts"], row(rows, "grpo", 0)["tokens"]) == (320, 9000)
    counts = ("steps", "rollouts", "tokens", "rollouts_profile", "tokens_profile", "tokens_lost")
    assert {type(row[name]) for row in rows for name in counts} == {int}
    assert row(rows, "sgpo", 0)["tokens_lost"] == 70


def test_the_leaderboard_is_sorted_by_test_accuracy(evidence: Evidence) -> None:
    rows = rows_of(evidence)
    assert [(r["recipe"], r["seed"]) for r in rows] == [
        ("sgpo", 1),
        ("grpo", 1),
        ("sgpo", 0),
        ("grpo", 0),
    ]
    assert rows[0]["pass_at_1_initial"] == 0.40
    assert rows[0]["greedy_initial"] == pytest.approx(0.42)


def test_the_summary_spreads_over_the_seeds(evidence: Evidence) -> None:
    summary = summary_of(evidence)
    grpo = summary["recipes"]["grpo"]
    assert grpo["pass_at_1"] == pytest.approx({"mean": 0.52, "min": 0.50, "max": 0.54})
    assert (grpo["pass_at_1_low"], grpo["pass_at_1_high"]) == pytest.approx((0.46, 0.58))
    assert grpo["num_seeds"] == 2
    assert summary["recipes"]["sgpo"]["flops_charged"]["mean"] == pytest.approx(400e9)


def test_compute_to_the_reference_counts_profiling(evidence: Evidence) -> None:
    """grpo ends at 0.53 on average. A third of its cost takes sgpo as far, and profiling is added
    in every account."""
    summary = summary_of(evidence)
    assert summary["target"] == pytest.approx(0.53)
    found = summary["recipes"]["sgpo"]["compute_to_reference"]
    assert list(found) == ["charged", "charged_mixed", "executed"]
    # the fitted curve rises from 0.40 to 0.56
    share = pytest.approx(0.13 / 0.16, abs=0.1)
    assert (found["charged"]["flops"] - 100e9) / 300e9 == share
    assert (found["charged_mixed"]["flops"] - 90e9) / 250e9 == share
    assert (found["executed"]["flops"] - 80e9) / 200e9 == share
    for needed in found.values():
        assert needed["low"] < needed["flops"]
        assert needed["high"] is None or needed["flops"] < needed["high"]
    grpo = summary["recipes"]["grpo"]["compute_to_reference"]["charged"]
    assert grpo["flops"] == pytest.approx(900e9), "it ends there"
    assert grpo["high"] is None, "half of its draws end below"


def test_the_champion_is_chosen_by_validation_and_confirmed_on_test(layout: Layout) -> None:
    summary = summary_of(read_evidence(layout, BOTH))
    assert (summary["champion"]["recipe"], summary["champion"]["seed"]) == ("sgpo", 1)
    write_training(layout, "sgpo", 1, scale=1 / 3, validation=0.57, test=0.42)
    summary = summary_of(read_evidence(layout, BOTH))
    assert summary["champion"] is None, "not clearly above 0.40, as grpo/1 is on test"
    assert "42.0% pass@1, +2.0 points against the initial policy" in summary["why"]
    assert summary["why"].endswith("not shown to be above it, so no champion")


def test_curves_start_where_profiling_ended(evidence: Evidence) -> None:
    starts = curve_table(evidence).filter(pl.col("step") == 0)
    assert starts.select("run", "^flops_.*$").rows() == [
        ("grpo/0", 0.0, 0.0, 0.0),
        ("grpo/1", 0.0, 0.0, 0.0),
        ("sgpo/0", 100e9, 90e9, 80e9),
        ("sgpo/1", 100e9, 90e9, 80e9),
    ]


def test_curves_count_rollouts_and_seconds_from_the_profile_on(evidence: Evidence) -> None:
    """sgpo's profile took 320 rollouts and 6 s; the third of grpo's 60 s is 20 s, spread over the
    curve as its executed FLOPs are."""
    ends = curve_table(evidence).filter(pl.col("step").is_in([0, 35]), pl.col("seed") == 0)
    assert ends["rollouts"].to_list() == [0, 280, 320, 600]
    assert ends["seconds"].to_list() == pytest.approx([0.0, 60.0, 6.0, 26.0])


@pytest.mark.parametrize(
    ("sgpo", "expected"),
    [
        (
            0.52,
            r"sgpo is 2\.0 points above grpo, but the interval of the difference \(-.* to \+.*\) "
            "holds 0: this run does not tell them apart",
        ),
        (
            0.50,
            r"sgpo is level with grpo, but the interval of the difference \(-.* to \+.*\) holds 0",
        ),
        (0.70, r"sgpo beats grpo by 20\.0 points \(\+1\d\.\d to \+2\d\.\d\)"),
        (0.30, r"sgpo loses to grpo by 20\.0 points \(-2\d\.\d to -1\d\.\d\)"),
    ],
)
def test_the_verdict_says_who_is_ahead_and_whether_it_can_be_told(
    layout: Layout, sgpo: float, expected: str
) -> None:
    write_training(layout, "sgpo", 0, scale=1 / 3, validation=0.55, test=sgpo)
    evidence = read_evidence(layout, Experiment(["grpo", "sgpo"], [0]))
    words = verdict(summary_of(evidence))
    assert re.search(expected, words), words
    assert "their 95 % intervals are over prompts." in words
    assert (
        "it takes 2.2 times less charged, 2.2 times less charged_mixed and 2.0 times less executed "
        "compute"
    ) in words
    assert "With one seed" in words


def test_the_verdict_does_not_hide_a_dearer_recipe(layout: Layout) -> None:
    write_training(layout, "sgpo", 0, scale=2.0, validation=0.45, test=0.5)
    evidence = read_evidence(layout, Experiment(["grpo", "sgpo"], [0]))
    words = verdict(summary_of(evidence))
    assert "2.1 times more charged, 2.1 times more charged_mixed and 2.1 times more" in words
    assert "On validation its fitted curve never reaches the 52.0% that grpo ends with" in words


@pytest.mark.parametrize(
    "name",
    [
        "train/steps.parquet",
        "train/rollouts.parquet",
        "train/curve.parquet",
        "train/flops.json",
        "train/cost.json",
        "eval/metrics.json",
        "eval/rollouts.parquet",
    ],
)
def test_a_missing_file_is_named_with_recipe_and_seed(layout: Layout, name: str) -> None:
    path = layout.recipe("sgpo") / "1" / name
    path.unlink()
    with pytest.raises(ArtifactError) as error:
        read_evidence(layout, BOTH)
    assert str(error.value).startswith(f"recipe 'sgpo', seed 1: {path} does not exist")


def test_a_missing_plan_is_named_with_recipe_and_seed(layout: Layout) -> None:
    (layout.plan("grpo", 1) / "forecast.json").unlink()
    with pytest.raises(
        ArtifactError, match=r"recipe 'grpo', seed 1: .*forecast\.json does not exist"
    ):
        read_evidence(layout, BOTH)


def test_what_could_not_be_measured_is_a_dash(layout: Layout) -> None:
    path = layout.evaluation("sgpo", 1) / "metrics.json"
    measured = read_sealed(path)
    measured["pass_at"]["8"] = None
    del measured["levels"]["10"]
    write_sealed(path, measured)
    evidence = read_evidence(layout, BOTH)
    assert "<td>–</td>" in page_of(evidence)


def contents(layout: Layout, names: list[str]) -> dict[str, bytes]:
    """The files, but for the minute in which the page was made."""
    minute = rb"<dt>made</dt><dd>\d{4}-\d\d-\d\d \d\d:\d\d UTC</dd>"
    found = {name: (layout.report / name).read_bytes() for name in names}
    assert len(re.findall(minute, found["index.html"])) == 1
    return {name: re.sub(minute, b"", content) for name, content in found.items()}


def test_equal_inputs_give_equal_files(layout: Layout, tmp_path: Path) -> None:
    params = write_params(tmp_path, ["grpo", "sgpo"], [0, 1])
    first = run_stage("report", params, layout.root)
    assert first.returncode == 0, first.output
    names = ["curve.csv", "index.html", "leaderboard.json", "leaderboard.txt", "summary.json"]
    names += ["rollouts.parquet"]
    cells = ("grpo/0", "grpo/1", "sgpo/0", "sgpo/1")
    names += [f"metrics/{cell}.json" for cell in cells]
    names += [f"plots/{account}.svg" for account in ("charged", "charged_mixed", "executed")]
    written = [path for path in layout.report.rglob("*") if path.is_file()]
    assert {path.relative_to(layout.report).as_posix() for path in written} == set(names)
    before = contents(layout, names)
    command = ["--params", str(params), "--data", str(layout.root)]
    subprocess.run([sys.executable, "-m", "tasks.report", *command], check=True)
    assert contents(layout, names) == before
    assert (layout.report / "leaderboard.txt").read_text() in first.output
    assert len(json.loads(before["leaderboard.json"])) == 4
    columns = "recipe,seed,run,step,flops_charged,flops_charged_mixed,flops_executed,rollouts,acc"
    assert before["curve.csv"].decode().startswith(columns)


def test_the_stage_fails_with_the_name_of_the_missing_file(layout: Layout, tmp_path: Path) -> None:
    params = write_params(tmp_path, ["grpo", "pods"], [0])
    done = run_stage("report", params, layout.root)
    assert done.returncode == 1
    assert "recipe 'pods', seed 0: " in done.output
    assert "Traceback" not in done.output


def test_the_terminal_table(evidence: Evidence) -> None:
    lines = text_table(rows_of(evidence), summary_of(evidence)).splitlines()
    assert (
        " ".join(lines[0].split())
        == "recipe seed pass@1 95 % interval greedy rollouts charged charged_mixed executed seconds"
    )
    assert lines[2].split()[:3] == ["sgpo", "1", "55.0%"]
    assert lines[2].split()[-4:] == ["400*", "340*", "310*", "28"]
    assert lines[3].split()[-4:] == ["900", "750", "630", "62"]
    assert "charged, charged_mixed, executed: compute in GFLOPs" in lines[7]
    assert max(map(len, lines)) <= 100


@given(st.floats(1e6, 1e25))
def test_flops_are_said_in_a_unit_that_reads_well(flops: float) -> None:
    size, name = unit(flops)
    assert 1 <= flops / size < 1000 or name == "EFLOPs"
    assert flops_words(flops).endswith(name)
