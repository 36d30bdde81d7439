"""`--look`: samples of a few prompts before the profile."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from flows.doctor.look import about, look, sentence, verdict
from tasks.code.effective import complete
from tasks.common import params
from tasks.common.artifacts import OUTCOMES, PROFILE, Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.params import ParamsError
from tests.allocate.test_allocate import profile_of
from tests.files import PROJECT
from tests.stages import run_stage
from tests.train.worlds import make_world

SGPO = {"strategy": "sgpo", "trivial_above": 0.75, "unsolved_rate": 0.5, "buckets": [2, 4]}


@pytest.fixture
def world(guesser: Path, tmp_path: Path) -> tuple[Layout, dict[str, Any]]:
    layout = make_world(tmp_path, guesser, [4, 4])
    card = read_checked(layout.policy_card)
    write_checked(layout.policy_card, {**card, "source": "tiny"})
    path = layout.root / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["recipes"]["s"] = {"allocate": SGPO, "train": {}}
    values["experiment"]["recipes"] = ["r", "s"]
    path.write_text(yaml.safe_dump(values))
    return layout, complete({**params.load(PROJECT / "params.yaml"), **values})


def test_the_samples_are_part_of_the_later_profile(world: tuple[Layout, dict[str, Any]]) -> None:
    layout, values = world
    first = look(values, layout, 4)
    assert "4 of 6 training prompts, 8 samples each: never solved " in first
    assert "about 48 rollouts" in first
    assert re.findall(r"^s +(\w+) +\S+ \(", first, re.M) == ["charged", "executed", "seconds"]
    assert "\ns: within " in first
    assert "\nr: " not in first  # reads no profile
    assert look(values, layout, 4).splitlines()[0] == first.splitlines()[0]
    assert not (layout.profile / "profile.parquet").exists()
    result = run_stage("profile", layout.root / "params.yaml", layout.root)
    assert "32 rollouts reused, 16 sampled" in result.output
    profile = PROFILE.read(layout.profile / "profile.parquet")
    whole = look(values, layout, 100)
    assert "6 of 6 training prompts, 8 samples each: never solved " in whole
    mean = profile["pass_rate"].mean()
    assert f"mean pass rate {mean:.2f} ({mean:.2f} to {mean:.2f})" in whole


def test_a_look_needs_prompts_and_a_policy(tmp_path: Path, world: Any) -> None:
    layout, values = world
    other = {**values, "policy": {**values["policy"], "source": "hf://org/name@main"}}
    for place, changed in ((Layout(tmp_path / "empty"), values), (layout, other)):
        with pytest.raises(ParamsError, match="`winnow run --until ingest policy` makes them"):
            look(changed, place, 4)


def test_prompts_without_a_grade_are_in_no_share() -> None:
    counts = [(0, 8), (8, 8), (4, 8), (0, 8)]
    profile = profile_of(counts).with_columns(error=pl.Series([0, 0, 0, 8], dtype=pl.Int32))
    rates = pl.Series([0.0, 1.0, 0.5, None])
    profile = profile.with_columns(pass_rate=rates, pass_rate_unbiased=rates)
    lacking = [name for name in OUTCOMES if name not in profile.columns]
    first, _ = about(profile.with_columns(pl.lit(0).alias(name) for name in lacking), 1000, 1.0)
    assert "never solved 33% (" in first
    assert "always 33% (" in first
    assert "mean pass rate 0.50 (0.00 to 1.00)" in first


def test_verdicts() -> None:
    inf = np.inf
    assert verdict((1.0, 0.5, 2.0), 2) == "is expected to pay"
    assert verdict((1.0, 0.5, 2.1), 2) == "may pay or not"
    assert verdict((inf, 2.1, inf), 2) == "is not expected to pay"
    assert sentence("s", (1.0, 0.5, 2.0), (inf, 2.1, inf), 2) == (
        "s: within 2 passes its profile is expected to pay per pass, and is not expected to pay "
        "per rollout of a mixed group (executed)"
    )
