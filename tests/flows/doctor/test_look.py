"""`--look`: samples of a few prompts before the profile."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flows.doctor.look import look, sentence, verdict
from tasks.code.effective import complete
from tasks.common import params
from tasks.common.artifacts import PROFILE, Layout
from tasks.common.params import ParamsError
from tests.files import PROJECT
from tests.stages import run_stage
from tests.train.worlds import make_world

SGPO = {"strategy": "sgpo", "trivial_above": 0.75, "unsolved_rate": 0.5, "buckets": [2, 4]}


@pytest.fixture
def world(guesser: Path, tmp_path: Path) -> tuple[Layout, dict[str, Any]]:
    layout = make_world(tmp_path, guesser, [4, 4])
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
    with pytest.raises(ParamsError, match="`winnow run --until ingest policy` makes them"):
        look(world[1], Layout(tmp_path / "empty"), 4)


def test_verdicts() -> None:
    inf = np.inf
    assert verdict((1.0, 0.5, 2.0), 2) == "is expected to pay"
    assert verdict((1.0, 0.5, 2.1), 2) == "may pay or not"
    assert verdict((inf, 2.1, inf), 2) == "is not expected to pay"
    assert sentence("s", (1.0, 0.5, 2.0), (inf, 2.1, inf), 2) == (
        "s: within 2 passes its profile is expected to pay per pass, and is not expected to pay "
        "per rollout of a mixed group (executed)"
    )
