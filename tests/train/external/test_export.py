"""A plan is exported whole: every visit once, in order, with its group size."""

import importlib.util
import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
import yaml

from tasks.common import params, registry
from tasks.common.artifacts import PLAN, PROMPTS, Layout
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError, digest_file, read_json
from tasks.common.params import ParamsError
from tasks.train.external import check, export, service, targets
from tasks.train.external.export import FILES, Options
from tasks.train.external.visits import Visits, of_recipe
from tests.train.external.conftest import SIZES

ALL = registry.names(targets)


def values_of(layout: Layout) -> dict[str, Any]:
    return params.load(layout.root / "params.yaml")


def exported(layout: Layout, out: Path, target: str, **options: Any) -> dict[str, Any]:
    visits = of_recipe(layout, values_of(layout), "r", 0)
    wanted = Options(target, **{"is_unordered": True} | options)
    return export.export(visits, wanted, values_of(layout), layout, "r/0", out)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pl.read_parquet(path).to_dicts()


def truth_in(row: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt, verifier and answer that a row of any target has as its ground truth."""
    for key in ("reward_model", "reward_spec"):
        row = {**row, **row.get(key, {})}
    text = next(row[key] for key in ("ground_truth", "label", "output", "answer") if key in row)
    return dict(json.loads(text))


@pytest.mark.parametrize("target", sorted({*ALL} - {"areal", "parquet"}))
def test_every_visit_is_exported_once_in_order(layout: Layout, tmp_path: Path, target: str) -> None:
    manifest = exported(layout, tmp_path / "out", target)
    segments = manifest["segments"]
    rows = [row for one in segments for row in rows_of(tmp_path / "out" / one["file"])]
    plan = PLAN.read(layout.plan("r", 0) / "plan.parquet")
    assert [truth_in(row)["prompt_id"] for row in rows] == plan["prompt_id"].to_list()
    assert {truth_in(row)["answer"] for row in rows} == {"7"}
    if target == "verl":
        sizes = [row["__rollout_n__"] for row in rows]
        assert {type(size) for size in sizes} == {int}
    else:
        sizes = [one["group_size"] for one in segments for _ in range(one["visits"])]
        assert [one["file"].split("/")[1] for one in segments] == ["000_n2", "001_n4", "002_n2"]
    assert sizes == SIZES
    assert sum(one["rollouts"] for one in segments) == sum(SIZES)
    assert len(rows_of(next((tmp_path / "out").glob("validation.*")))) == 6


def test_manifest_names_origin_files_and_losses(layout: Layout, tmp_path: Path, qwen: Path) -> None:
    values = values_of(layout)
    values["recipes"]["r"]["train"] = {"loss": {"method": "cispo"}, "kl_coefficient": 0.1}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    manifest = exported(layout, tmp_path / "out", "trl")
    assert manifest == read_json(tmp_path / "out" / "manifest.json")
    assert manifest["digests"]["plan"] == digest_file(layout.plan("r", 0) / "plan.parquet")
    lost = manifest["not_carried"]
    assert [text.partition(":")[0] for text in lost] == ["train.kl_coefficient", "train.loss"]
    assert [one["visits_in_an_incomplete_batch"] for one in manifest["segments"]] == [2, 0, 3]
    for name, digest in manifest["files"].items():
        assert digest_file(tmp_path / "out" / name) == digest
    settings = (tmp_path / "out/segments/001_n4/settings.txt").read_text()
    assert "num_generations=4" in settings
    assert f'model="{qwen}"' in settings


def test_what_a_trainer_cannot_carry_is_refused(layout: Layout, tmp_path: Path) -> None:
    out, values = tmp_path / "out", values_of(layout)
    with pytest.raises(ParamsError, match="skyrl shuffles its prompts.*--unordered"):
        exported(layout, out, "skyrl", is_unordered=False)
    out.mkdir()
    with pytest.raises(ArtifactError, match="out exists"):
        exported(layout, out, "trl")
    out.rmdir()
    values["recipes"]["r"]["train"] = {"control": {"method": "greso"}}
    with pytest.raises(ParamsError, match="no plan to export.*greso chooses prompts"):
        of_recipe(layout, values, "r", 0)
    plain = PROMPTS.read(layout.prompts("train"))
    PROMPTS.write(layout.prompts("train"), plain.with_columns(messages=pl.lit(None, pl.String)))
    with pytest.raises(ParamsError, match="verl applies the policy's chat template.*p0 is plain"):
        exported(layout, out, "verl")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # nothing half-written
    exported(layout, out, "trl")
    [row, *_] = rows_of(out / "segments/000_n2/train.parquet")
    assert row["prompt"] == "0 ="


def test_a_plan_of_another_profile_is_refused(layout: Layout, tmp_path: Path) -> None:
    write_checked(layout.plan("r", 0) / "forecast.json", {"profile": "another"})
    with pytest.raises(ArtifactError, match="is of another profile"):
        exported(layout, tmp_path / "out", "trl")


def test_pass_rates_of_an_earlier_policy_are_named(layout: Layout) -> None:
    assert of_recipe(layout, values_of(layout), "r", 0).not_carried == []
    write_checked(layout.profile / "summary.json", {"policy": "another"})
    first, *_ = of_recipe(layout, values_of(layout), "r", 0).not_carried
    assert first.startswith("the pass rates are of policy another, older than ")


def test_prompts_alone_have_no_order_and_no_sizes(layout: Layout, tmp_path: Path) -> None:
    values = values_of(layout)
    values["recipes"]["r"]["train"] = {"control": {"method": "greso"}}
    plan = PLAN.read(layout.plan("r", 0) / "plan.parquet")
    kept = plan.filter(pl.col("prompt_id").is_in(["p1", "p4"]))
    PLAN.write(layout.plan("r", 0) / "plan.parquet", kept)
    visits = of_recipe(layout, values, "r", 0, prompts_only=True)
    export.export(visits, Options("skyrl"), values, layout, "r/0", tmp_path / "out")
    rows = rows_of(tmp_path / "out/train.parquet")
    assert [truth_in(row)["prompt_id"] for row in rows] == ["p1", "p4"]
    assert [row["extra_info"]["pass_rate"] for row in rows] == [1 / 8, 4 / 8]
    assert "n_samples_per_prompt=8" in (tmp_path / "out/settings.txt").read_text()


def test_control_is_as_large_as_the_plan(layout: Layout, tmp_path: Path) -> None:
    found = of_recipe(layout, values_of(layout), "r", 0)
    kept = found.table.filter(pl.col("prompt_id").is_in(["p1", "p2"]))
    half = Visits(kept, True, found.digests, [])
    options = Options("verl", control_seed=1)
    export.export(half, options, values_of(layout), layout, "r/0", tmp_path / "out")
    rows = rows_of(tmp_path / "out/control/train.parquet")
    assert len(rows) == len({truth_in(row)["prompt_id"] for row in rows}) == 2


def test_plain_ground_truth_is_the_answer(layout: Layout, tmp_path: Path) -> None:
    exported(layout, tmp_path / "out", "verl", is_plain=True)
    [row, *_] = rows_of(tmp_path / "out/train.parquet")
    assert row["reward_model"]["ground_truth"] == "7"
    assert not (tmp_path / "out/reward.py").exists()


def test_check_compares_what_a_loader_reads(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = exported(layout, tmp_path / "out", "verl")
    visits = of_recipe(layout, values_of(layout), "r", 0)
    truths = [export.truth_of(row, False) for row in visits.table.iter_rows(named=True)]
    rows = [list(pair) for pair in zip(truths, SIZES, strict=True)]
    script = tmp_path / "python"  # prints what a loader would
    run = partial(check.check, visits, Options("verl"), manifest, tmp_path / "out", str(script))
    for wrong, message in (
        (None, "loads 8 visits in the plan's order and group sizes"),
        (rows[:7], "loads 7 visits of 8, and only the first 7"),
        ([*rows[:3], rows[4], rows[3], *rows[5:]], "only the first 3 are the plan's"),
        ([*rows[:6], [truths[6], 8], rows[7]], "only the first 6 are the plan's"),
    ):
        found = json.dumps({"version": "0.9.1", "files": [wrong or rows]})
        script.write_text(f"#!/bin/sh\ncat << 'END'\n{found}\nEND\n")
        script.chmod(0o755)
        if wrong is None:
            assert message in next(run())
        else:
            with pytest.raises(ArtifactError, match=message):
                list(run())


def test_check_names_what_is_missing(layout: Layout, tmp_path: Path) -> None:
    manifest = exported(layout, tmp_path / "out", "openrlhf")
    visits = of_recipe(layout, values_of(layout), "r", 0)
    run = partial(check.check, visits, Options("openrlhf"), manifest, tmp_path / "out")
    missing = "written but not checked, because openrlhf cannot be imported in .*'openrlhf'"
    with pytest.raises(ArtifactError, match=missing):
        list(run(sys.executable))
    with pytest.raises(ArtifactError, match="cannot be run"):
        list(run(str(tmp_path / "python")))
    with pytest.raises(ParamsError, match="no loader of slime can be run"):
        check.require_loader("slime")


def test_limits_of_a_prompt_are_the_longest_prompts(layout: Layout, tmp_path: Path) -> None:
    exported(layout, tmp_path / "out", "verl")
    longest = len("5+1+1+1+1+1 =")
    settings = (tmp_path / "out/settings.txt").read_text().splitlines()
    assert f"data.max_prompt_length={longest}" in settings


# ------------------------------------------------------------------------------------- the service


def reward_module(folder: Path) -> Any:
    shutil.copy(FILES / "reward.py.txt", folder / "reward.py")
    spec = importlib.util.spec_from_file_location("reward", folder / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def label(prompt: str = "p0", **changes: str) -> str:
    return json.dumps({"prompt_id": prompt, "verifier": "numeric", "answer": "7", **changes})


def test_rewards_of_verl_and_trl_are_the_verifiers(address: str, tmp_path: Path) -> None:
    reward = reward_module(tmp_path)
    assert reward.compute_score("winnow", "so it is 7", label()) == 1.0
    assert reward.compute_score("winnow", "so it is 8", label()) == 0.0
    chats = [[{"role": "assistant", "content": "7"}], [{"role": "assistant", "content": "6"}]]
    assert reward.winnow(chats, [label(), label()], prompts=["", ""]) == [1.0, 0.0]
    assert reward.winnow(["7"], [label(answer="no number")]) == [None]
    with pytest.raises(RuntimeError, match="could not be graded"):
        reward.compute_score("winnow", "7", label(answer="no number"))


def test_payloads_of_slime_and_openrlhf(address: str) -> None:
    with httpx.Client(base_url=address, params={"token": "secret"}) as client:
        one = {"prompt": "1 =", "response": "7", "label": label()}
        assert client.post("/slime", json=one).json() == 1.0
        several = {"query": ["a: 7", "a: 1"], "prompts": ["a: ", "a: "], "labels": [label()] * 2}
        assert client.post("/openrlhf", json=several).json()["rewards"] == [1.0, 0.0]
        refused = client.post("/slime", json={**one, "label": label(answer="no number")})
        assert (refused.status_code, "not graded (error)" in refused.text) == (422, True)
        refused = client.post("/slime", json={**one, "label": "7"})
        assert "not one that `winnow export` writes" in refused.text
        refused = client.post("/grade", json=[{"completion": "7", "label": label("p9")}])
        assert "prompt p9 is not in this data root" in refused.text
        assert client.post("/grade", content=b"[").status_code == 422
        refused = client.post("/slime", json={**one, "label": label(verifier="no")})
        assert "verifier 'no' is of no prompt" in refused.text
        assert client.post("/slime", json=one).json() == 1.0  # the grader goes on
    assert httpx.post(f"{address}/slime", json=one).status_code == 401


def test_special_tokens_at_the_end_are_not_graded(address: str) -> None:
    """AReaL and OpenRLHF decode the end token, too."""
    with httpx.Client(base_url=address, params={"token": "secret"}) as client:
        pair = {"completion": "7<eos><pad><pad>", "label": label()}
        [verdict] = client.post("/grade", json=[pair]).json()
        assert verdict == {"reward": 1.0, "outcome": "correct", "answer": "7"}
        several = {"query": ["b: 7"], "prompts": ["a: "], "labels": [label()]}
        refused = client.post("/openrlhf", json=several)
        assert (refused.status_code, "does not begin with" in refused.text) == (422, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/grade", b"{"),
        ("/grade", b"3"),
        ("/grade", b"[3]"),
        ("/grade", b'{"completion": "7"}'),
        ("/grade", b'[{"completion": 7, "label": "{}"}]'),
        ("/grade", b"[" * 100_000),
        ("/grade", b"\xff"),
        ("/slime", b"[]"),
        ("/openrlhf", b'{"query": [1], "prompts": ["a"], "labels": ["b"]}'),
        ("/openrlhf", b'{"query": ["a"], "prompts": [], "labels": []}'),
    ],
)
def test_a_malformed_request_is_422(address: str, path: str, body: bytes) -> None:
    refused = httpx.post(address + path, content=body, params={"token": "secret"})
    assert refused.status_code == 422, refused.text


def test_dead_processes_are_started_again(
    address: str, grading: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post() -> httpx.Response:
        body = [{"completion": "7", "label": label()}]
        return httpx.post(f"{address}/grade", json=body, params={"token": "secret"})

    assert post().json()[0]["reward"] == 1.0
    pool = grading.grader.grader.pool
    assert pool is not None
    assert pool.loader is not None
    os.kill(pool.loader.popen.pid, signal.SIGKILL)
    assert post().json()[0]["reward"] == 1.0

    def broken(*_: Any) -> None:
        raise ValueError("the loader cannot start")

    with monkeypatch.context() as patch:
        patch.setattr(grading.grader.grader, "grade", broken)
        failed = post()
    assert (failed.status_code, failed.text[:15]) == (500, "grading failed,")
    assert post().json()[0]["reward"] == 1.0  # by a new grader
