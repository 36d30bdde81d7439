"""Rounds side by side: the kept policy of each, the total cost, and the change of pass rates.
Numbers are those of `conftest`, and of a second round."""

import shutil
from pathlib import Path

import polars as pl
import pytest

from tasks.common.artifacts import PROFILE, Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError
from tasks.report import rounds
from tests.report.conftest import make_layout, run_report
from tests.report.test_report import data_of
from tests.stages import run_stage

SOURCE = "data/runs/sgpo/1/train/policy"


@pytest.fixture(scope="module")
def second(reported: Layout, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Return a second round that starts from sgpo/1, with each prompt solved once more; both have
    reports."""
    first = Layout(shutil.copytree(reported.root, tmp_path_factory.mktemp("rounds") / "data"))
    layout = make_layout(first.root / "rounds" / "2")
    card = {**read_checked(layout.policy_card), "source": SOURCE, "digest": "sgpo-1"}
    write_checked(layout.policy_card, card)
    metrics = layout.baseline / "metrics.json"
    write_checked(metrics, {**read_checked(metrics), "policy": "sgpo-1"})
    path = layout.profile / "profile.parquet"
    easier = (pl.col("pass_rate") + 1 / 8).clip(0, 1)
    PROFILE.write(path, PROFILE.read(path).with_columns(easier))
    run_report(layout, "--before", str(first.root))
    return layout


def test_the_summary_adds_the_costs_of_the_kept_policies(second: Layout) -> None:
    first, last = read_checked(second.report / "summary.json")["rounds"]
    assert (first["round"], first["source"], last["source"]) == (1, "tiny", SOURCE)
    assert (first["kept"]["recipe"], first["kept"]["seed"]) == ("sgpo", 1)
    assert first["kept"]["pass_at_1"] == pytest.approx(0.55)
    # sgpo at a third of 900, and 100 of profiling; twice
    assert first["flops"]["charged"] == pytest.approx(
        {"profile": 100e9, "total": 400e9, "cumulative": 400e9}
    )
    assert last["flops"]["charged"]["cumulative"] == pytest.approx(800e9)
    # executed: a third of 600, and 80 of profiling
    assert last["flops"]["executed"]["cumulative"] == pytest.approx(560e9)


def test_prompts_are_counted_by_kind(second: Layout) -> None:
    first, last = (one["prompts"] for one in read_checked(second.report / "summary.json")["rounds"])
    # of 40 prompts, solved 0, 1, ... 8 times in turn
    names = ("never solved", "learnable", "always solved", "not known")
    assert [first[name] for name in names] == [5, 31, 4, 0]
    assert [last[name] for name in names] == [0, 32, 8, 0]


def test_the_page_shows_the_rounds_side_by_side(second: Layout) -> None:
    html = (second.report / "index.html").read_text()
    assert "<h2>Rounds</h2>" in html
    assert "<td>sgpo/1 (champion)</td>" in html
    assert "<td>1 → 2</td><td>never solved</td><td>0</td><td>5</td><td>0</td>" in html
    charts = data_of(html)["charts"]
    line, *dots = charts["rounds"]["variants"][0]["data"]
    assert line["x"] == pytest.approx([0, 0.4, 0.8])  # TFLOPs
    assert len(dots) == 8  # two recipes and two seeds, twice
    assert [trace["name"] for trace in charts["round_rates"]["variants"][0]["data"]] == [
        "round 1",
        "round 2",
    ]


def test_a_single_round_has_no_section_on_rounds(second: Layout) -> None:
    first = Layout(second.root.parent.parent)
    html = (first.report / "index.html").read_text()
    assert "<h2>Rounds</h2>" not in html
    assert "rounds" not in read_checked(first.report / "summary.json")
    assert "rounds" not in data_of(html)["charts"]


def test_a_start_that_the_earlier_round_lacks_is_named(second: Layout) -> None:
    card = read_checked(second.policy_card)
    write_checked(second.policy_card, {**card, "source": "data/runs/pods/0/train/policy"})
    params, first = second.root.parent / "params.yaml", second.root.parent.parent
    done = run_stage("report", params, second.root, "--before", str(first))
    write_checked(second.policy_card, card)
    assert done.returncode == 1
    assert "pods/0, from which the next round started, is not on the leaderboard of" in done.output
    with pytest.raises(ArtifactError, match=r"another policy of sgpo/1 \(sgpo-1\) than the .*77b0"):
        rounds.read_round(1, Layout(first), card, {**card, "digest": "77b0"})


@pytest.mark.parametrize("source", ["tiny", "models/runs/sgpo/0/policy"])
def test_a_policy_that_no_round_trained_is_refused(source: str) -> None:
    assert rounds.cell_of(str(Path("/x") / SOURCE)) == "sgpo/1"
    with pytest.raises(ArtifactError, match="was not trained in any round"):
        rounds.cell_of(source)
