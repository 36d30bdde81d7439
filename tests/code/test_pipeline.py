"""dvc.yaml against the code digests: the dependencies of each stage."""

from typing import Any

import pytest

from tasks.code.cells import cells
from tasks.code.effective import complete, of_cells
from tasks.common import params
from tasks.common.code import ROOT
from tasks.common.recipes import recipe
from tasks.train.loading import settings_of
from tasks.train.settings import Sections
from tasks.train.trainers.own import run_parameters

STAGES: dict[str, dict[str, Any]] = params.load(ROOT / "dvc.yaml")["stages"]
VALUES = complete(params.load(ROOT / "params.yaml"))


@pytest.mark.parametrize("stage", sorted(set(STAGES) - {"code"}))
def test_a_stage_depends_only_on_its_own_digest_and_settings(stage: str) -> None:
    folder = "${item.recipe}/" if "matrix" in STAGES[stage] else ""
    code = [dep for dep in STAGES[stage]["deps"] if not dep.startswith("data/")]
    digests = [dep for dep in STAGES[stage]["deps"] if dep.startswith("data/code/")]
    assert code == []
    assert digests == [f"data/code/{folder}{stage}.json"]
    assert STAGES[stage]["params"] == [{f"data/code/{folder}{stage}.params.yaml": None}]
    name = f"{folder}{stage}".replace("${item.recipe}", "grpo")
    assert name in cells(VALUES, ROOT)
    assert name in of_cells(VALUES)


def test_the_digests_depend_on_all_their_inputs() -> None:
    """Without the parameters and recipes, `dvc repro` would not update the digests."""
    assert STAGES["code"]["params"] == [{"params.yaml": None}]
    assert {"tasks", "recipes"} <= set(STAGES["code"]["deps"])


def test_a_checkpoints_key_has_the_settings_of_its_cell() -> None:
    settings = settings_of(recipe(VALUES, "winnow")["train"])
    key = run_parameters(settings, params.sections(VALUES, Sections))
    found = of_cells({**VALUES, "engine": {**VALUES["engine"], "name": "hf"}})["winnow/train"]
    assert {**key, "engine": {**key["engine"], "name": "hf"}} == found
    engine = {**VALUES["engine"], "name": "server", "vllm": {"quantization": "fp8"}}
    values = {**VALUES, "engine": engine}
    key = run_parameters(settings, params.sections(values, Sections))
    assert key == of_cells(values)["winnow/train"]
    assert key["engine"]["vllm"] == {"quantization": "fp8"}
