"""The report on a pipeline written by hand (`conftest`): totals, accurate words, one self-contained
page."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.artifacts import CURVE, PROFILE, STEPS, Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError
from tasks.common.params import Budget, Experiment
from tasks.report.curves import flops_words, unit
from tasks.report.evidence import read_evidence
from tasks.report.results import Results, results_of
from tasks.report.run import NO_ROLLOUTS
from tasks.report.settings import ReportSettings
from tasks.report.views.figures import steps_binned
from tasks.report.views.page import page
from tasks.report.views.plots import plots
from tasks.report.views.tables import forecast_table, leaderboard_table, text_table
from tests.report.conftest import results, run_report, write_params, write_plans, write_training
from tests.report.test_external import OUTCOMES, write_import

ACCOUNTS = ("charged", "charged_mixed", "executed")


@pytest.fixture(scope="module")
def found(finished: Layout) -> Results:
    return results(finished)


def row(found: Results, recipe: str, seed: int) -> dict[str, Any]:
    return next(row for row in found.rows if (row["recipe"], row["seed"]) == (recipe, seed))


def data_of(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return dict(json.loads(text))


def test_costs_include_a_profile_if_it_is_read_and_no_validation(found: Results) -> None:
    grpo, sgpo = row(found, "grpo", 0), row(found, "sgpo", 0)
    parts = {"profile": 0.0, "generate": 300e9, "score": 0.0, "update": 600e9, "total": 900e9}
    assert grpo["flops_charged"] == parts
    parts = {"profile": 0.0, "generate": 200e9, "score": 0.0, "update": 400e9, "total": 600e9}
    assert (grpo["flops_executed"], grpo["flops_validation"]) == (parts, 50e9)
    assert sgpo["flops_charged"] == pytest.approx(
        {"profile": 100e9, "generate": 100e9, "score": 0.0, "update": 200e9, "total": 400e9}
    )
    assert sgpo["flops_executed"]["total"] == pytest.approx((80 + 200) * 1e9)
    assert sgpo["flops_charged_paper"]["total"] == pytest.approx(100e9 + 100e9 + 300e9)
    assert (grpo["tokens_profile"], sgpo["tokens_profile"]) == (0, 5000)


def test_recipes_are_compared_in_every_account(found: Results) -> None:
    html = page(found, NO_ROLLOUTS)
    heads = re.findall(r"<thead><tr>(.*?)</tr>", html.partition("<script>")[0])
    compared = [head for head in heads if "charged" in head and "executed" in head]
    assert len(compared) == 2, "the leaderboard, and over the seeds"
    assert all("charged_mixed" in head for head in compared)
    costs = html.partition("Where the compute went")[2]
    named = re.findall(r"</td><td>((?:charged|executed)\w*)</td>", costs)
    assert named == [*ACCOUNTS, "charged_paper"] * 4
    assert all(f"{account} compute, GFLOPs" in html for account in ACCOUNTS)


def test_a_forecast_is_compared_as_rates(found: Results) -> None:
    """grpo spends 9,000 tokens on 320 rollouts, sgpo about a third of both."""
    table, run = forecast_table(found), found.evidence.trained[0]
    assert [table.count(f"<td>30.0 → {length}</td>") for length in (28.1, 28.0)] == [2, 2]
    assert f"<td>50.0% → {run.steps['num_mixed_groups'].sum() / (4 * 35):.1%}</td>" in table


def test_dropping_dead_groups_does_not_make_a_champion(layout: Layout) -> None:
    """The same weights cost less in `charged`, and the same in `charged_mixed`."""
    write_plans(layout, "grpo_mixed", reads_profile=False)
    write_training(layout, "grpo_mixed", 0, scale=1.0, validation=0.52, test=0.50)
    path = layout.train("grpo_mixed", 0) / "flops.json"
    flops = read_checked(path)
    write_checked(path, {**flops, "charged": flops["charged_mixed"]})
    found = results(layout, ["grpo", "grpo_mixed"], [0])
    assert [row["recipe"] for row in found.rows] == ["grpo", "grpo_mixed"]
    assert found.summary["champion"]["recipe"] == "grpo"


def test_the_leaderboard_is_sorted_by_test_accuracy(found: Results) -> None:
    order = [(row["recipe"], row["seed"]) for row in found.rows]
    assert order == [("sgpo", 1), ("grpo", 1), ("sgpo", 0), ("grpo", 0)]
    assert found.rows[0]["pass_at_1_initial"] == 0.40
    assert found.rows[0]["greedy_initial"] == pytest.approx(0.42)
    assert (row(found, "grpo", 0)["rollouts"], row(found, "grpo", 0)["tokens"]) == (320, 9000)
    counts = ("steps", "rollouts", "tokens", "rollouts_profile", "tokens_profile")
    assert {type(row[name]) for row in found.rows for name in counts} == {int}


def test_the_summary_spreads_over_the_seeds(found: Results) -> None:
    grpo = found.summary["recipes"]["grpo"]
    assert grpo["pass_at_1"] == pytest.approx({"mean": 0.52, "min": 0.50, "max": 0.54})
    assert (grpo["pass_at_1_low"], grpo["pass_at_1_high"]) == pytest.approx((0.46, 0.58))
    assert grpo["num_seeds"] == 2
    assert found.summary["recipes"]["sgpo"]["flops_charged"]["mean"] == pytest.approx(400e9)


def test_compute_to_the_reference_counts_profiling(found: Results) -> None:
    """grpo ends at 0.53 on average with 600 GFLOPs executed. The fitted curve of sgpo rises from
    0.40 to 0.56 over 200, after a profile of 80."""
    (end,) = found.summary["points"]["sgpo"]
    assert (end["share"], end["accuracy"]) == (1.0, pytest.approx(0.56))
    assert end["over_reference"]["mean"] == pytest.approx(0.03)
    assert end["over_reference"]["low"] < 0.03 < end["over_reference"]["high"]
    less = end["compute_ratio"]
    assert less["times"] == pytest.approx(600 / (80 + 200 * 0.13 / 0.16), rel=0.1)
    assert less["low"] is None or less["low"] < less["times"] < less["high"]
    (reference,) = found.summary["points"]["grpo"]
    assert (reference["over_reference"], reference["compute_ratio"]) == (None, None)


def test_a_budget_compares_at_every_branch(layout: Layout) -> None:
    """At a quarter of the budget sgpo is 4 points ahead, and needed half as much."""
    for recipe, quarter in (("grpo", 0.45), ("sgpo", 0.49)):
        path = layout.train(recipe, 0) / "curve.parquet"
        points = CURVE.read(path).to_dicts()
        points[2] |= {"accuracy": quarter, "branch": 0.25}
        CURVE.write(path, CURVE.frame(points))
    found = results(layout, seeds=[0], budget=Budget("charged", 9e11))
    quarter, end = found.summary["points"]["sgpo"]
    assert (quarter["share"], end["share"]) == (0.25, 1.0)
    assert quarter["over_reference"]["mean"] == pytest.approx(0.04)
    # grpo: 2 / 7 of 900; sgpo from 0.40 at 100 to 0.49 at 100 + 2 / 7 of 300
    needed = 100 + 300 * 2 / 7 * (0.45 - 0.40) / (0.49 - 0.40)
    assert quarter["compute_ratio"]["times"] == pytest.approx(900 * 2 / 7 / needed)
    assert row(found, "sgpo", 0)["validation_at"] == {"0.25": pytest.approx(0.49)}
    words = text_table(found)
    assert re.search(r"^sgpo +25% +49\.0% +\+4\.0 \(.*\) +\d\.\d \(", words, re.MULTILINE)
    without = results(layout, seeds=[0]).summary["points"]["sgpo"]
    assert [point["share"] for point in without] == [1.0]


def test_the_page_has_model_data_and_budget_and_starts_on_its_account(layout: Layout) -> None:
    html = page(results(layout, budget=Budget("executed", 6e11)), NO_ROLLOUTS)
    words = "tiny (0.44M parameters) on reasoning_gym/chain_sum, 600 GFLOPs executed per recipe"
    assert f"<title>Winnow: {words}</title>" in html
    assert f"<h1>{words}</h1>" in html
    assert data_of(html)["account"] == "executed"


def test_test_accuracy_is_drawn_with_its_interval(found: Results) -> None:
    """Of two seeds the interval is from the lowest to the highest end: 46 % to 58 % for grpo."""
    (one,) = data_of(page(found, NO_ROLLOUTS))["charts"]["tested"]["variants"]
    drawn = {trace["name"]: trace for trace in one["data"]}
    assert list(drawn) == ["sgpo", "grpo", "initial"]
    assert [trace["x"][0] for trace in drawn.values()] == pytest.approx([0.53, 0.52, 0.40])
    for name, half in (("initial", 0.04), ("grpo", 0.06)):
        error = drawn[name]["error_x"]
        assert error["array"] + error["arrayminus"] == pytest.approx([half, half])


def test_an_unfinished_page_names_the_missing_cells(copied: Layout) -> None:
    """No other file changes, nothing is recorded, and no recipe is ranked. grpo/1 is in no pair."""
    before = {path: path.read_bytes() for path in copied.root.rglob("*") if path.is_file()}
    run_report(copied, "--cells", "grpo/1", "sgpo/0", "grpo/0")
    after = {path: path.read_bytes() for path in copied.root.rglob("*") if path.is_file()}
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed == {"index.html", "measured.js"}
    html = (copied.report / "index.html").read_text()
    assert "Unfinished: 3 of 4 cells have ended" in html
    assert "Missing: sgpo/1.</p>" in html
    assert "<b>Champion: none.</b>" in html
    assert {*data_of(html)["advice"]["charged"]} == {
        read_evidence(
            copied, Experiment(["grpo", "sgpo"], [0, 1]), ["grpo/0", "grpo/1", "sgpo/0"]
        ).unranked
    }
    assert data_of(html)["rollouts"]["prompts"] == []


def test_a_profile_without_a_success_ranks_no_recipe(layout: Layout) -> None:
    """99 of 128 samples are truncated. A run with a success on test is ranked."""
    counts = {"wrong": [0, 29], "truncated": [64, 35], "correct": [0, 0], "num_samples": [64, 64]}
    profile = PROFILE.read(layout.profile / "profile.parquet")[:2]
    PROFILE.write(
        layout.profile / "profile.parquet",
        profile.with_columns(
            **{k: pl.Series(v, dtype=pl.Int32) for k, v in counts.items()}, pass_rate=0.0
        ),
    )
    found = results(layout)
    assert found.summary["champion"]
    trained = [
        replace(run, metrics={**run.metrics, "pass_at_1": 0.0}) for run in found.evidence.trained
    ]
    summary = results_of(
        replace(found.evidence, trained=trained), ReportSettings(num_bootstrap=10)
    ).summary
    assert summary["headline"] == (
        "Recipes are not ranked, because no sample of the profile is correct: of 128 samples 99 "
        "truncated, 29 wrong. To change that, raise sampling.max_tokens, which most completions "
        "reach."
    )
    assert (summary["champion"], summary["why"]) == (None, "recipes are not ranked")


def test_runs_with_rollouts_of_another_run_are_named(found: Results) -> None:
    evidence = found.evidence
    first = evidence.trained[0]
    assert "whose generation" not in text_table(found)
    flops = {**first.flops, "not_charged": ["data/runs/grpo/<1>/train"]}
    trained = [replace(first, flops=flops), *evidence.trained[1:]]
    shared = results_of(replace(evidence, trained=trained), ReportSettings(num_bootstrap=10))
    words = f"{first.name}: it also trained on rollouts of data/runs/grpo/<1>/train, whose"
    assert words in text_table(shared)
    assert words.replace("<1>", "&lt;1&gt;") in leaderboard_table(shared)


def test_the_champion_is_chosen_by_validation_and_confirmed_on_test(layout: Layout) -> None:
    champion = results(layout).summary["champion"]
    assert (champion["recipe"], champion["seed"]) == ("sgpo", 1)
    write_training(layout, "sgpo", 1, scale=1 / 3, validation=0.57, test=0.42)
    summary = results(layout).summary
    assert summary["champion"] is None, "not clearly above 0.40, as grpo/1 is on test"
    assert "42.0% pass@1, +2.0 points against the initial policy" in summary["why"]
    assert summary["why"].endswith("not shown to be above it, so no champion")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([0.3, 0.375], "b/0 has the best validation accuracy (37.5%); on test b/0 reaches"),
        (
            [0.375, 0.375],
            "a/0 has the best validation accuracy (37.5%), tied with b; of equals the cheapest in "
            "charged_mixed is chosen; on test a/0 reaches",
        ),
        (
            [0.3, 0.3, 0.25, 0.375],
            "b has the best validation accuracy (31.2%, the mean of 2 seeds), b/1 the best of its "
            "seeds (37.5%); on test b/1 reaches",
        ),
        (
            [0.375, 0.375, 0.375, 0.375],
            "a has the best validation accuracy (37.5%, the mean of 2 seeds), a/0 the best of its "
            "seeds (37.5%; of equal seeds the lowest), tied with b; of equals",
        ),
    ],
)
def test_a_tie_is_named_with_the_rule(found: list[float], words: str, layout: Layout) -> None:
    """a is cheaper."""
    seeds = range(len(found) // 2)
    for place, recipe in enumerate("ba"):
        write_plans(layout, recipe, reads_profile=False)
        for seed in seeds:
            validation = found[seed + len(seeds) * (1 - place)]
            cost = {"scale": 1.0 - 0.5 * place, "test": 0.5}
            write_training(layout, recipe, seed, validation=validation, **cost)
    assert results(layout, ["b", "a"], seeds).summary["why"].startswith(words)


def test_the_evaluation_of_other_weights_is_refused(layout: Layout) -> None:
    write_checked(layout.trained_card("sgpo", 1), {"digest": "3f2a"})
    message = r"eval/metrics\.json is of another policy \(sgpo-1\) than the present one \(3f2a\): "
    with pytest.raises(ArtifactError, match=message):
        results(layout)
    write_checked(layout.policy_card, {**read_checked(layout.policy_card), "digest": "77b0"})
    with pytest.raises(ArtifactError, match=r"baseline/metrics\.json is of another policy"):
        results(layout)


def test_the_plot_has_the_share_of_rollouts_with_an_advantage() -> None:
    """Two steps of 4 rollouts in a bin: 3 of 8, and a step without sampled rollouts."""
    rows = [
        {**STEPS.example, "step": step, "num_rollouts": num, "num_mixed_groups": 0}
        for step, num in ((0, 4), (1, 4), *((step, 0) for step in range(2, 26)))
    ]
    advantages = [0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, -1.0]
    rollouts = pl.DataFrame({"step": [0] * 4 + [1] * 4, "advantage": advantages})
    assert steps_binned(STEPS.frame(rows), rollouts)["alive"].to_list() == [3 / 8, *[None] * 12]


def test_curves_start_after_the_profile(found: Results) -> None:
    """sgpo's profile has 320 rollouts."""
    starts = found.curves.filter(pl.col("step") == 0)
    assert starts.select("run", "^flops_.*$").rows() == [
        ("grpo/0", 0.0, 0.0, 0.0),
        ("grpo/1", 0.0, 0.0, 0.0),
        ("sgpo/0", 100e9, 90e9, 80e9),
        ("sgpo/1", 100e9, 90e9, 80e9),
    ]
    ends = found.curves.filter(pl.col("step").is_in([0, 35]), pl.col("seed") == 0)
    assert ends["rollouts"].to_list() == [0, 280, 320, 600]


@pytest.mark.parametrize(
    "name", ["train/steps.parquet", "train/rollouts.parquet", "eval/metrics.json"]
)
def test_a_missing_file_is_named_with_recipe_and_seed(layout: Layout, name: str) -> None:
    path = layout.recipe("sgpo") / "1" / name
    path.unlink()
    with pytest.raises(ArtifactError) as error:
        results(layout)
    assert str(error.value).startswith(f"{path} does not exist")


def test_unmeasured_values_are_dashes(layout: Layout) -> None:
    path = layout.evaluation("sgpo", 1) / "metrics.json"
    measured = read_checked(path)
    measured["pass_at"]["8"] = None
    del measured["levels"]["10"]
    write_checked(path, measured)
    assert "<td>–</td>" in page(results(layout), NO_ROLLOUTS)


@pytest.mark.usefixtures("forked_stages")
def test_equal_inputs_give_equal_outputs(reported: Layout, layout: Layout, tmp_path: Path) -> None:
    """Measured seconds and imports are in files that are not outputs."""
    names = ["curve.csv", "index.html", "leaderboard.json", "leaderboard.txt", "summary.json"]
    names += ["rollouts.parquet"]
    names += [f"metrics/{recipe}/{seed}.json" for recipe in ("grpo", "sgpo") for seed in (0, 1)]
    names += [f"plots/{name}.svg" for name in (*ACCOUNTS, "executed-dark")]
    written = [path for path in reported.report.rglob("*") if path.is_file()]
    written_names = {path.relative_to(reported.report).as_posix() for path in written}
    assert written_names == {*names, "measured.js", "external.js"}
    before = {name: (reported.report / name).read_bytes() for name in names}
    for note in layout.measured("*").parent.iterdir():
        note.unlink()
    write_import(layout, "first", OUTCOMES)
    params = write_params(tmp_path, ["grpo", "sgpo"], [0, 1])
    command = ["--params", str(params), "--data", str(layout.root)]
    subprocess.run([sys.executable, "-m", "tasks.report", *command], check=True)
    assert {name: (layout.report / name).read_bytes() for name in names} == before
    assert before["leaderboard.txt"].decode() in (reported.root.parent / "output").read_text()
    assert len(json.loads(before["leaderboard.json"])) == 4
    columns = "recipe,seed,run,step,flops_charged,flops_charged_mixed,flops_executed,rollouts,acc"
    assert before["curve.csv"].decode().startswith(columns)


def test_the_terminal_table(found: Results) -> None:
    lines = text_table(found).splitlines()
    assert (
        " ".join(lines[0].split())
        == "recipe seed pass@1 95 % interval greedy rollouts charged charged_mixed executed"
    )
    assert lines[2].split()[:3] == ["sgpo", "1", "55.0%"]
    assert lines[2].split()[-3:] == ["400*", "340*", "280*"]
    assert lines[3].split()[-3:] == ["900", "750", "600"]
    assert "charged, charged_mixed, executed: compute in GFLOPs" in lines[7]
    assert max(map(len, lines)) <= 100


@given(st.floats(1e6, 1e25))
def test_flops_have_a_unit_that_reads_well(flops: float) -> None:
    size, name = unit(flops)
    assert 1 <= flops / size < 1000 or name == "EFLOPs"
    assert flops_words(flops).endswith(name)


def test_unknown_compute_of_another_trainer_is_named(layout: Layout) -> None:
    """The other accounts go on; no chart or fit has a place for the unknown one."""
    path = layout.train("sgpo", 0) / "flops.json"
    flops = {key: value for key, value in read_checked(path).items() if key != "winnow-sha256"}
    write_checked(path, {**flops, "executed": None})
    curve = layout.train("sgpo", 0) / "curve.parquet"
    CURVE.write(curve, CURVE.read(curve).with_columns(flops_executed=pl.lit(None, pl.Float64)))
    found = results(layout, ["grpo", "sgpo"])
    assert found.evidence.axes == ["charged", "charged_mixed", "rollouts"]
    assert set(found.fits["grpo"]) == set(found.evidence.axes)
    assert "flops_executed" not in found.summary["recipes"]["sgpo"]
    words = text_table(found)
    last = [line.split()[-1] for line in words.splitlines() if line.startswith("sgpo ")]
    assert last[:2] == ["280*", "unknown"]
    assert "sgpo/0: another trainer, whose executed FLOPs are unknown" in words
    assert set(plots(found)) == {"charged", "charged_mixed"}
    assert "unknown" in leaderboard_table(found)
