"""The pipeline of another data root: the real dvc.yaml, moved elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.common.config.derived import pipeline
from tasks.common.params import ParamsError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "dvc.yaml").read_text()
MAIN = yaml.safe_load(TEXT)["stages"]


def stages(folder: str) -> dict[str, Any]:
    return dict(yaml.safe_load(pipeline(TEXT, folder))["stages"])


def test_other_root_has_all_stages_and_no_path_of_the_first() -> None:
    found = stages("other")
    assert list(found) == list(MAIN)
    assert "data/" not in pipeline(TEXT, "other")
    profile = found["profile"]
    assert profile["wdir"] == ".."
    assert profile["cmd"] == "exec python -m tasks.profile --params other/params.yaml --data other"
    assert profile["params"] == [{"other/code/profile.params.yaml": None}]
    assert found["code"]["params"] == [{"other/params.yaml": None}]
    assert found["train"]["matrix"] == MAIN["train"]["matrix"]
    assert found["code"]["deps"] == MAIN["code"]["deps"]  # the code does not move


def test_dvc_stores_all_outputs_of_another_root() -> None:
    found = stages("other")
    outs = [out for stage in found.values() for out in stage["outs"] if isinstance(out, dict)]
    persistent = ("other/code", "other/policy", "other/policy.json")
    assert outs == [{path: {"persist": True}} for path in persistent]
    assert found["report"]["outs"][-1] == "other/report/plots"
    made = yaml.safe_load(pipeline(TEXT, "other"))
    assert (made["metrics"], made["plots"]) == (["report/metrics"], ["report/plots"])


def test_command_without_a_root_is_refused() -> None:
    with pytest.raises(ParamsError, match="'python x.py' must contain --params params.yaml --data"):
        pipeline("stages: {a: {cmd: python x.py, deps: [], params: [], outs: []}}", "other")
