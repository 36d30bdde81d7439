"""Stages with sources, policy, store and MLflow's artifacts in a bucket of a real S3 server."""

import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import mlflow
import polars as pl
import psutil
import pytest
import yaml

from tasks.common.artifacts import PROMPTS, Layout
from tasks.common.locations import open_location
from tasks.common.tracking import Tracking, replay, track
from tests.patience import wait_for
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.stages import Forked, give_record, run_stage
from tests.test_chain import settings
from tests.train.worlds import make_world


def command(root: Path, stage: str) -> str:
    """Run one stage in this process with debug logs. Return its log, also saved beside the root."""
    params = root.parent / "params.yaml"
    done = run_stage(stage, params, root, level=logging.DEBUG)
    (root.parent / f"{root.name}-{stage}-{time.time_ns()}.log").write_text(done.output)
    assert done.returncode == 0, done.output
    return done.output


def reused_and_sampled(log: str) -> tuple[int, int]:
    """Return the numbers of reused and sampled rollouts in the log of a stage."""
    ((reused, sampled),) = re.findall(r"([\d,]+) rollouts reused, ([\d,]+) sampled", log)
    return int(reused.replace(",", "")), int(sampled.replace(",", ""))


def write_params(folder: Path, **changes: Any) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump(settings(**changes)))


def put_sources(bucket: str) -> list[dict[str, Any]]:
    """Write eight prompts as JSONL and eight as Parquet. Return their entries of
    `ingest.sources`."""
    files, path = open_location(bucket)
    rows = pl.DataFrame(
        {"q": [f"{n} + {n} =" for n in range(16)], "a": [str(2 * n) for n in range(16)]}
    )
    files.pipe_file(f"{path}/prompts/a.jsonl", rows[:8].write_ndjson().encode())
    with files.open(f"{path}/prompts/b.parquet", "wb") as file:
        rows[8:].write_parquet(file)
    fields = {"name": "sums", "prompt": "q", "answer": "a", "level": None, "verifier": "numeric"}
    return [
        {"preset": "mapping", "settings": {"path": f"{bucket}/prompts/{name}", **fields}}
        for name in ("a.jsonl", "b.parquet")
    ]


def objects(location: str) -> list[str]:
    files, path = open_location(location)
    return [str(name) for name in files.find(path)]


@pytest.mark.s3
@pytest.mark.slow
def test_all_data_in_one_bucket_and_no_credential_in_any_file(
    bucket: str, guesser: Path, tmp_path: Path
) -> None:
    files, path = open_location(bucket)
    files.put(str(guesser), f"{path}/models/guesser", recursive=True)
    write_params(
        tmp_path,
        ingest={
            "splits": {"train": 12, "validation": 2, "test": 2},
            "sources": put_sources(bucket),
        },
        policy={"source": f"{bucket}/models/guesser"},
        sampling={"max_tokens": 8},
        profile={"num_samples": 4},
        store={"location": f"{bucket}/store"},
        tracking={"max_weights_gb": 1.0},
    )
    one, other = Layout(tmp_path / "one"), Layout(tmp_path / "other")
    give_record(one.root)
    record = mlflow.MlflowClient(f"sqlite:///{one.tracking}/mlflow.db")
    record.create_experiment("winnow", f"{bucket}/mlflow")
    log = command(one.root, "ingest") + command(one.root, "policy") + command(one.root, "profile")
    assert len(PROMPTS.read(one.prompts("train"))) == 12
    assert reused_and_sampled(log) == (0, 48)
    assert any(name.endswith("model.safetensors") for name in objects(f"{bucket}/mlflow"))
    shutil.copytree(one.root, other.root, ignore=shutil.ignore_patterns("profile", "tracking"))
    assert reused_and_sampled(command(other.root, "profile")) == (48, 0)
    for name in ("profile", "rollouts"):
        table = f"{name}.parquet"
        assert pl.read_parquet(other.profile / table).equals(pl.read_parquet(one.profile / table))
    written = {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    written |= {name: files.cat_file(name) for name in objects(bucket)}
    assert any(bucket.encode() in content for content in written.values())
    assert [
        (name, key)
        for key in (ACCESS_KEY, SECRET_KEY)
        for name in written
        if key.encode() in written[name]
    ] == []


@pytest.mark.s3
@pytest.mark.slow
def test_profile_without_its_store_fails_and_can_be_repeated(
    bucket: str, s3: S3Server, guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_world(tmp_path / "data", guesser, [4, 4])
    write_params(
        tmp_path,
        sampling={"max_tokens": 8},
        profile={"num_samples": 300},
        store={"location": bucket},
    )
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    stage = Forked("profile", tmp_path / "params.yaml", layout.root, variables=variables)
    wait_for(lambda: stage.log.exists() and "sample (hf): " in stage.log.read_text())
    s3.hold_gateway()  # the batch that is being sampled cannot be stored
    wait_until_idle(stage.process.pid)
    s3.kill_gateway()
    try:
        log = stage.finish()
        assert stage.returncode == 1
        assert re.search(
            rf"{bucket}\S*: the server does not respond .* run the same command again", log
        )
        assert "Traceback" not in log
    finally:
        s3.start_gateway()
    assert [name for name in objects(bucket) if name.endswith(".parquet")] == []
    assert reused_and_sampled(command(layout.root, "profile")) == (0, 1800)


def wait_until_idle(pid: int | None) -> None:
    """Wait until a process has used no CPU time for a while."""
    used, process = -1.0, psutil.Process(pid)
    while used != (used := sum(process.cpu_times()[:2])):
        time.sleep(0.5)


@pytest.mark.s3
def test_record_without_its_bucket_is_replayed(
    bucket: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, kept = Layout(tmp_path / "data"), tmp_path / "kept.txt"
    kept.write_text("kept")
    give_record(layout.root)
    uri = f"sqlite:///{layout.tracking}/mlflow.db"
    mlflow.MlflowClient(uri).create_experiment("test", f"{bucket}/mlflow")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    s3.kill_gateway()
    try:
        with track(Tracking(None, "test", 0.0, []), layout, "report", None, None) as tracker:
            tracker.artifact(kept)
    finally:
        s3.start_gateway()
    assert objects(bucket) == []
    (pending,) = (layout.tracking / "pending").glob("*.jsonl")
    replay(pending, uri)
    (name,) = objects(bucket)
    assert name.endswith("artifacts/kept.txt")
