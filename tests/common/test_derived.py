"""The files that make a folder a data root: the real dvc.yaml and params.yaml, moved elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.common.config.derived import Round, parameters, pipeline
from tasks.common.params import ParamsError, load, parsed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "dvc.yaml").read_text()
MAIN = yaml.safe_load(TEXT)["stages"]
SECOND = "data/rounds/2"
SGPO = "data/runs/sgpo/0/train/policy"


def stages(folder: str, later: Round | None = None) -> dict[str, Any]:
    return dict(yaml.safe_load(pipeline(TEXT, folder, later))["stages"])


def test_other_root_has_all_stages_and_no_path_of_the_first() -> None:
    found = stages("other")
    assert list(found) == list(MAIN)
    assert "data/" not in pipeline(TEXT, "other", None)
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
    made = yaml.safe_load(pipeline(TEXT, SECOND, Round(("data",), SGPO)))
    assert (made["metrics"], made["plots"]) == (["report/metrics"], ["report/plots"])


def test_later_round_reads_the_first_prompts_and_a_policy() -> None:
    found = stages(SECOND, Round(("data",), SGPO))
    assert set(MAIN) - set(found) == {"ingest"}
    assert found["profile"]["wdir"] == "../../.."
    assert "data/prompts/train.parquet" in found["profile"]["deps"]
    assert f"{SECOND}/policy" in found["profile"]["deps"]
    assert SGPO in found["policy"]["deps"]
    assert found["policy"]["cmd"].endswith(f"--data {SECOND} --copy")
    assert not [out for stage in found.values() for out in stage["outs"] if "/prompts/" in out]


def test_report_of_a_later_round_reads_all_earlier_reports() -> None:
    third = stages("data/rounds/3", Round(("data", SECOND), f"{SECOND}/runs/sgpo/0/train/policy"))
    assert third["report"]["cmd"].endswith(f"--before data --before {SECOND}")
    for root in ("data", SECOND):
        assert f"{root}/report/leaderboard.json" in third["report"]["deps"]
    assert "data/prompts/test.parquet" in third["report"]["deps"]  # not those of the second


def test_command_without_a_root_is_refused() -> None:
    with pytest.raises(ParamsError, match="'python x.py' must contain --params params.yaml --data"):
        pipeline("stages: {a: {cmd: python x.py, deps: [], params: [], outs: []}}", "other", None)


def test_parameters_differ_in_the_policy_and_share_store_and_record() -> None:
    path = ROOT / "params.yaml"
    text = parameters(path, "data", SGPO)
    before, after = load(path), parsed(text)
    assert after["policy"].pop("source") == SGPO
    assert after["store"].pop("location") == "data/store"
    assert after["tracking"].pop("uri") == "sqlite:///data/tracking/mlflow.db"
    for section, key in (("policy", "source"), ("store", "location"), ("tracking", "uri")):
        del before[section][key]
    assert after == before
    assert "# right sometimes: mean pass rate" in text


def test_named_store_and_server_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "policy: {source: tiny}\nstore: {location: s3://team/store}\ntracking: {uri: http://there}\n"
    )
    after = yaml.safe_load(parameters(path, "other", "other/runs/sgpo/0/train/policy"))
    assert after["store"]["location"] == "s3://team/store"
    assert after["tracking"]["uri"] == "http://there"
