"""dvc.yaml against the code digests: who depends on what."""

from typing import Any

import pytest

from tasks.code.cells import cells
from tasks.common import params
from tasks.common.code import ROOT
from tasks.train.run import Sections, run_parameters
from tasks.train.settings import TrainSettings

STAGES: dict[str, dict[str, Any]] = params.load(ROOT / "dvc.yaml")["stages"]
VALUES = params.load(ROOT / "params.yaml")


@pytest.mark.parametrize("stage", sorted(set(STAGES) - {"code"}))
def test_a_stage_depends_on_its_own_digest_and_on_no_code(stage: str) -> None:
    folder = "${item.recipe}/" if "matrix" in STAGES[stage] else ""
    code = [dep for dep in STAGES[stage]["deps"] if not dep.startswith("data/")]
    digests = [dep for dep in STAGES[stage]["deps"] if dep.startswith("data/code/")]
    assert code == []
    assert digests == [f"data/code/{folder}{stage}.json"]
    assert f"{folder}{stage}".replace("${item.recipe}", "grpo") in cells(VALUES, ROOT)


def test_the_digests_depend_on_all_that_they_read() -> None:
    """Without a parameter that names files, `dvc repro` would leave the digests as they were."""
    values = {
        **VALUES,
        "ingest": {"sources": [{"preset": "math", "settings": {}, "verifier": "math_and_tags"}]},
        "engine": {"name": "server"},
        "policy": {"source": "hf://org/name@main"},
        "experiment": {"recipes": ["pods", "composed"], "seeds": [0]},
    }
    known: dict[str, Any] = {"experiment": {"seeds": [0]}}
    for name in STAGES["code"]["params"]:
        section, _, key = name.partition(".")
        if key:
            known.setdefault(section, {})[key] = values[section][key]
        else:
            known[section] = values[section]
    assert cells(known, ROOT) == cells(values, ROOT) != cells(VALUES, ROOT)


def test_the_checkpoints_key_and_dvc_name_the_same_parameters() -> None:
    settings = params.section(VALUES, "train", TrainSettings)
    key = run_parameters(settings, params.sections(VALUES, Sections))
    nested = ("engine", "verify")
    names = {name for name in key if name not in nested}
    names |= {f"{name}.{inner}" for name in nested for inner in key[name]}
    assert names | {"recipes.${item.recipe}.train"} == set(STAGES["train"]["params"])
    assert set(key["train"]) == set(VALUES["train"])
