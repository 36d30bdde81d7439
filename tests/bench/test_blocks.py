"""The comparison in blocks: intervals, ratios of compute, and the parameters of a block."""

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from flows.benchmark.results import read_results
from tasks.code import effective
from tasks.report.views.plots import THEMES
from tests.bench.block_figure import figure, svg
from tests.bench.block_lines import ROOT, TOKENS, Run, archive, mixed_rollouts
from tests.bench.block_page import (
    NAMES,
    compute,
    detectable,
    interval,
    page,
    ratio,
    separable,
    summary,
)
from tests.bench.blocks import check_policy, params_of, read_plan, run_blocks

HARDER = ROOT / "docs/results/blocks/gsm-hard.md"
PLANS = sorted((ROOT / "docs/results/blocks").glob("*.yaml"))
COMPUTE = np.array([[1.0, 2.0, 4.0]])


def test_students_interval() -> None:
    """Four values with a deviation of 1.291: 3.182 of its standard errors on either side."""
    assert interval(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((2.5, 0.446, 4.554), abs=1e-3)
    mean, low, high = interval(np.array([2.0]))
    assert (mean, np.isnan(low), np.isnan(high)) == (2.0, True, True)


def test_the_detectable_difference_is_found_that_often() -> None:
    rng = np.random.default_rng(0)
    shift = detectable(1.0, 5)
    lows = [interval(rng.normal(shift, 1.0, 5))[1] for _ in range(4000)]
    assert np.mean(np.array(lows) > 0) == pytest.approx(0.8, abs=0.06)


def test_the_ratio_of_compute_at_equal_accuracy() -> None:
    """The reference gains .1 per doubling; the recipe reaches at 1 what it reaches at 2."""
    rng = np.random.default_rng(0)
    reference = np.array([0.2, 0.3, 0.4]) + rng.normal(0, 0.001, (6, 3))
    mine = 0.3 + rng.normal(0, 0.001, 6)
    cost = np.repeat(COMPUTE, 6, axis=0)
    middle, low, high = ratio(mine, np.ones(6), reference, cost)
    assert middle == pytest.approx(2.0, rel=0.03)
    assert 1.9 < low < 2.0 < high < 2.1
    assert ratio(mine, np.full(6, 2.0), reference, cost)[0] == pytest.approx(1.0, rel=0.03)
    # beyond the reference's runs there is only a bound: 4 times, and once, their compute of 1
    assert ratio(mine + 0.2, np.ones(6), reference, cost) == pytest.approx(
        (np.nan, 4.0, np.inf), nan_ok=True
    )
    assert ratio(mine - 0.2, np.ones(6), reference, cost) == pytest.approx(
        (np.nan, 0.0, 1.0), nan_ok=True
    )
    assert ratio(mine + rng.normal(0, 0.5, 6), np.ones(6), reference, cost)[1:] == (0.0, np.inf)


def test_the_ratio_that_is_found() -> None:
    """A difference that is found, divided by the reference's .1 per doubling."""
    reference = np.tile([0.2, 0.3, 0.4], (4, 1))
    mine = 0.3 + np.array([0.01, -0.01, 0.02, -0.02])
    found = separable(mine, np.ones(4), reference, np.repeat(COMPUTE, 4, axis=0))
    deviation = (10 / 3) ** 0.5 * 0.01
    assert found == pytest.approx(2 ** (detectable(deviation, 4) / 0.1), rel=1e-3)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_interval_contains_the_factor_as_often_as_it_says(factor: float) -> None:
    rng = np.random.default_rng(1)
    cost, found = np.repeat(COMPUTE, 5, axis=0), list[bool]()
    for _ in range(400):
        block = rng.normal(0, 0.03, (5, 1))  # prompts and policy, shared by all runs of a block
        reference = np.array([0.2, 0.3, 0.4]) + block + rng.normal(0, 0.02, (5, 3))
        mine = 0.3 + block[:, 0] + rng.normal(0, 0.02, 5)
        _, low, high = ratio(mine, np.full(5, 2.0 / factor), reference, cost)
        found.append(bool(low <= factor <= high))
    assert np.mean(found) == pytest.approx(0.95, abs=0.035)


def line(recipe: str, length: str, block: int, correct: str, spent: float) -> dict[str, Any]:
    flops = dict.fromkeys(("charged", "charged_mixed", "charged_paper", "executed"), spent)
    return {
        "key": f"{block} {recipe} {length}",
        "recipe": recipe,
        "length": length,
        "block": block,
        "correct": correct,
        "trials": 4,
        "rollouts": spent / 1e12,
        "rollouts_profile": 0.0,
        "flops": flops,
        "flops_profile": dict.fromkeys(flops, 0.0),
    }


RUNS = [Run(["grpo"], rollouts=9), Run(["grpo", "sgpo"], 2)]
LINES = [
    line(recipe, length, block, text, spent)
    for recipe, length, texts, spent in (
        ("start", "", ("1100", "2200"), 0.0),
        ("grpo", "9 rollouts", ("2100", "2210"), 5e11),
        ("grpo", "2 passes", ("2200", "2220"), 2e12),
        ("sgpo", "2 passes", ("2200", "2220"), 1e12),
    )
    for block, text in enumerate(texts)
]
WORSE = ("1100", "2200")  # of both blocks: as little below the reference's first run


def test_the_page_has_differences_within_blocks() -> None:
    planned = [*RUNS, Run(["dapo", "sgpo"], rollouts=9)]
    text = page({"title": "T", "reference": "grpo"}, planned, LINES)
    assert "Planned, not measured: `dapo` (9 rollouts), `sgpo` (9 rollouts)." in text
    (row,) = [row for row in text.splitlines() if row.startswith("| `sgpo` | 2 p")]
    # 10 of 32 and 6 of 32 in the mean; the difference from grpo is 0 in both blocks
    assert "| 31.2 % | +12.5 (+12.5 to +12.5) | +0.0 (+0.0 to +0.0) |" in row
    (row,) = [row for row in text.splitlines() if row.startswith("| `sgpo`, 2 passes")]
    assert row.count("2.00") >= 4


def test_hypotheses_are_decided_in_their_order_and_after_all_blocks() -> None:
    plan = {"title": "T", "reference": "grpo", "blocks": [0, 1]}
    plan["hypotheses"] = [["sgpo", "executed"], ["sgpo", "charged_paper"]]

    def sentences(lines: list[dict[str, Any]], **changes: Any) -> list[str]:
        text = page({**plan, **changes}, RUNS, lines)
        return [row for row in text.splitlines() if row[:2] in ("1.", "2.")]

    # as accurate as grpo's last run, for half of its compute
    assert all("shown: `sgpo` needs less" in row for row in sentences(LINES))
    assert all("1 of 2 blocks" in row for row in sentences([x for x in LINES if x["block"] == 0]))
    scattered = [*LINES[:-1], {**LINES[-1], "correct": "0000"}]
    first, second = sentences(scattered)
    assert "not separable" in first
    assert "not tested" in second
    worst = [*LINES[:-2], *({**x, "correct": y} for x, y in zip(LINES[-2:], WORSE, strict=True))]
    assert "refuted: `sgpo` needs more" in sentences(worst)[0]


def test_a_profile_is_paid_once_or_shared() -> None:
    mine = {**line("sgpo", "2 passes", 0, "1", 8.0), "flops_profile": {"executed": 4.0}}
    mine |= {"seconds": {"generate": 3.0, "update": 2.0, "train": 9.0}, "seconds_profile": 2.0}
    assert [compute(mine, "executed", paid) for paid in (1, 1 / 4)] == [12.0, 9.0]
    assert [compute(mine, "seconds", paid) for paid in (1, 1 / 4)] == [7.0, 5.5]


def test_a_profile_that_stops_early_costs_its_share() -> None:
    """Of orders of 4 of 8, 4 / 7 have a success and a failure in the first 2, and 34 / 35 in the
    first 4. grpo needs 2 TFLOPs for the accuracy of sgpo, which pays 2.971 / 8 of its profile."""
    plan = {"title": "T", "reference": "grpo", "blocks": [0, 1]}
    plan["hypotheses"] = [["sgpo", "executed"]]
    lines = [{**x, "profile": "4440"} if x["recipe"] == "start" else x for x in LINES]
    lines = [
        {**x, "rollouts_profile": 1.0, "flops_profile": dict.fromkeys(x["flops"], 4e11)}
        if x["recipe"] == "sgpo"
        else x
        for x in lines
    ]
    text = page(plan, RUNS, lines)
    assert "25% of the prompts have equal rewards" in " ".join(text.split())
    samples = (3 * (2 * 4 / 7 + 4 * (34 / 35 - 4 / 7) + 8 / 35) + 8) / 4
    (row,) = [row for row in text.splitlines() if row.startswith("| `mixed`")]
    expected = 2e12 / (1e12 + 4e11 * samples / 8)
    assert row.startswith(f"| `mixed` | {samples:.2f} |")
    assert f" {expected:.2f} (" in row


def test_the_figure_has_a_second_mark_for_a_shared_profile() -> None:
    lines = [{**x, "mixed": [0.5, 0.4, 0.3, 0.2]} for x in LINES]
    drawn = svg({"reference": "grpo"}, RUNS, lines, THEMES[0])
    assert drawn == svg({"reference": "grpo"}, RUNS, lines, THEMES[0])
    assert drawn != svg({"reference": "grpo"}, RUNS, lines, THEMES[1])
    paid = [{**x, "flops_profile": dict.fromkeys(x["flops"], 4e11)} for x in lines[-2:]]
    marks = [
        sum(len(axes.lines) for axes in figure({"reference": "grpo"}, RUNS, each).axes[:2])
        for each in (lines, [*lines[:-2], *paid])
    ]
    assert marks[1] == marks[0] + 2


def test_rollouts_in_mixed_groups() -> None:
    """Two of three groups of two are not mixed; a replayed rollout does not count."""
    rows = [(0, 0, "correct"), (0, 0, "wrong"), (0, 1, "wrong"), (0, 1, "wrong")]
    rows += [(1, 0, "correct"), (1, 0, "correct"), (1, 0, "wrong")]
    replayed = [False] * 6 + [True]
    frame = pl.DataFrame(rows, ["step", "group", "outcome"], orient="row")
    assert mixed_rollouts(frame.with_columns(replayed=pl.Series(replayed))) == 2


def test_the_readme_has_the_comparison() -> None:
    path = ROOT / "docs/results/blocks/gsm.yaml"
    lines = [*read_results(path.with_suffix(".jsonl")).values()]
    readme, ours = (ROOT / "README.md").read_text(), "\n".join(summary(*read_plan(path), lines))
    assert ours in readme
    pitch = readme.partition("\nOn word problems, ")[2].partition("\n\n")[0]
    numbers = re.compile(r"\d+[.,]\d+")
    assert {*numbers.findall(pitch)} - {"2.5", "3.1"} <= {*numbers.findall(ours)}  # the paper's
    rows = re.findall(r"\| `(\w+)` \| ([\d,]+) \w+ \| 1 \| ([\d.]+ %)", HARDER.read_text())
    tests = {(recipe, length): test for recipe, length, test in rows}
    assert (
        f"`winnow` reaches {tests['winnow', '4,096']} after 4,096 rollouts, `grpo` "
        f"{tests['grpo', '4,096']} after 4,096 and {tests['grpo', '8,192']} after 8,192, and "
        f"`sgpo` {tests['sgpo', '2']} after two passes."
    ) in " ".join(readme.split())


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_is_valid_and_its_page_agrees_with_its_lines(path: Path) -> None:
    plan, runs = read_plan(path)
    for run in runs:
        effective.complete(params_of(plan, plan["blocks"][0], run))
    lines = [*read_results(path.with_suffix(".jsonl")).values()]
    text = path.with_suffix(".md").read_text() if lines else page(plan, runs, lines)
    assert text == page(plan, runs, lines)
    cells = {
        run.key(block, recipe) for run in runs for block in plan["blocks"] for recipe in run.recipes
    }
    assert {line["key"] for line in lines if line["recipe"] not in NAMES} <= cells


def test_a_block_with_another_policy_and_a_block_outside_the_plan_are_refused(
    tmp_path: Path,
) -> None:
    check_policy(None, "b")
    check_policy({"block": 1, "policy": "b"}, "b")
    with pytest.raises(SystemExit, match="block 1 has lines of the initial policy a, and this"):
        check_policy({"block": 1, "policy": "a"}, "b")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"blocks": [0], "runs": []}))
    with pytest.raises(SystemExit, match=r"has no block 7; it has \[0\]"):
        run_blocks(tmp_path / "plan.yaml", tmp_path / "work", [7], 1)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.yaml is empty"),
        ("runs: [", "plan.yaml is not YAML: .*line 1"),
        ("extends: absent.yaml", "absent.yaml does not exist"),
        ("extends: plan.yaml", "plan.yaml extends itself"),
        ("blocks: [0]", "plan.yaml: `runs` is missing"),
        ("runs: [{recipe: [grpo]}]", "unexpected keyword argument 'recipe'"),
    ],
)
def test_a_damaged_plan_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(SystemExit, match=message):
        read_plan(tmp_path / "plan.yaml")


def test_the_parameters_of_a_block(tmp_path: Path) -> None:
    source = {"preset": "gsm_symbolic", "settings": {"seed": 0, "num_prompts": 10}}
    params: dict[str, Any] = {"ingest": {"sources": [source]}}
    plan = {"problems": 100, "runs": [], "params": params}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    read, _ = read_plan(tmp_path / "plan.yaml")
    values = params_of(read, 3, Run(["grpo"], 2))
    assert values["ingest"]["sources"][0]["settings"]["seed"] == 103
    assert values["experiment"] == {"recipes": ["grpo"], "seeds": [3], "budget": None}
    assert values["allocate"] == {"passes": 2}
    assert json.loads(json.dumps(read)) == plan  # unchanged
    harder = {"extends": "plan.yaml", "problems": 200, "params": {"profile": {}}}
    (tmp_path / "harder.yaml").write_text(yaml.safe_dump(harder))
    other, _ = read_plan(tmp_path / "harder.yaml")
    assert other == {**plan, "problems": 200, "params": {**params, "profile": {}}}
    budget = params_of(read, 0, Run(["grpo"], rollouts=64))["experiment"]["budget"]
    assert budget == {"account": "rollouts", "amount": 64}


def test_an_archive_has_data_roots(tmp_path: Path) -> None:
    train = tmp_path / "kept/0 2 passes/runs/grpo/0/train"
    train.mkdir(parents=True)
    rows = {"text": ["a"], **{name: [[1]] for name in TOKENS}}
    pl.DataFrame(rows).write_parquet(train / "rollouts.parquet")
    (tmp_path / "kept/0 2 passes/policy.json").write_text("{}")
    archives = []
    for _ in range(2):
        archive(tmp_path / "kept", tmp_path / "gsm", 0)
        archives.append((tmp_path / "gsm-0.tar.xz").read_bytes())
    assert archives[0] == archives[1]
    with pytest.raises(SystemExit, match="no tables of block 1"):
        archive(tmp_path / "kept", tmp_path / "gsm", 1)
    assert not (tmp_path / "gsm-1.tar.xz").exists()
    with tarfile.open(tmp_path / "gsm-0.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    assert (tmp_path / "gsm-0-2-passes/policy.json").read_text() == "{}"
    rollouts = pl.read_parquet(tmp_path / "gsm-0-2-passes/runs/grpo/0/train/rollouts.parquet")
    assert rollouts.to_dict(as_series=False) == {"text": ["a"]}
