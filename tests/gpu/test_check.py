"""The check of a GPU, with small sizes on the CPU. A stopped check continues."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.files import PROJECT
from tests.gpu.check.__main__ import write_page
from tests.gpu.check.part import measure
from tests.stages import run_together

PARTS = ("engine", "update", "device_time", "variants")


def check(out: Path, part: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "tests.gpu.check", "--small", "--out", str(out), "--parts", part]
    return subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=900)


def rows_of(name: str, out: Path) -> list[dict[str, Any]]:
    return list(json.loads((out / f"{name}.json").read_text())["rows"])


@pytest.mark.slow
def test_only_a_failed_part_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "environment.json").mkdir()  # the result cannot be written
    failed = check(tmp_path, "environment")
    assert failed.returncode == 1
    assert "environment: failed, see" in failed.stdout
    (tmp_path / "environment.json").rmdir()
    (tmp_path / "environment.json").touch()  # an empty file is no result
    done = check(tmp_path, "environment")
    assert done.returncode == 0, (tmp_path / "environment.log").read_text()[-1500:]
    assert done.stdout == "environment: done\n"
    page = (tmp_path / "page.md").read_text()
    assert "nothing of a GPU" in page
    assert "## environment" in page
    written = (tmp_path / "environment.json").stat().st_mtime_ns
    assert check(tmp_path, "environment").stdout == "environment: was there\n"
    assert (tmp_path / "environment.json").stat().st_mtime_ns == written


def test_parts_write_their_rows(tmp_path: Path) -> None:
    run_together(partial(measure, small=True), [(n, tmp_path / f"{n}.json") for n in PARTS])
    found = {name: rows_of(name, tmp_path) for name in PARTS}
    assert found["engine"][0]["largest gap"] < 1e-4  # float32 on both sides
    assert all(row["tokens/s"] > 0 for row in found["engine"][2:] + found["update"])
    assert {row["micro-batches"] > 1 for row in found["update"]} == {True}
    assert {row["waits"] for row in found["update"]} == {1}  # for the gradient's norm
    assert {row["part"] for row in found["device_time"]} == {"prefill", "update"}
    assert all(row["measured / modelled"] > 1 for row in found["device_time"])
    assert [row["trained"] for row in found["variants"]] == ["whole", "fsdp2", "adapters"]
    assert found["variants"][0]["largest change"] > 1e-3
    assert found["variants"][1]["largest share"] < 0.05
    write_page(tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert all(f"## {name}" in page for name in PARTS)


def check_killed_after(out: Path, part: str, row: str) -> list[dict[str, Any]]:
    """Kill a part once a row is saved, and continue it. Return the part's rows, the saved first."""
    line = [sys.executable, "-m", "tests.gpu.check", "--small", "--out", str(out)]
    killed = subprocess.Popen([*line, "--parts", part], cwd=PROJECT)
    saved = out / f"{part}.small" / "rows" / f"{row}.json"
    while not saved.exists() and killed.poll() is None:
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    made = dict(json.loads(saved.read_text()))
    assert check(out, part).returncode == 0, (out / f"{part}.log").read_text()[-3000:]
    assert not saved.parents[1].exists()
    rows = rows_of(part, out)
    assert made in rows
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures("forked_stages")
def test_killed_check_continues(tmp_path: Path) -> None:
    policy, profile, *runs = check_killed_after(tmp_path, "larger", "profile")
    assert policy["kills"] == 1
    assert 5_000 < policy["parameters"] < 20_000
    assert 0 < profile["pass rate"] < 0.8
    assert [run["run"] for run in runs] == ["grpo", "grpo, killed"]
    assert [run["kills"] for run in runs] == [0, 1]
    assert [run["rollouts"] for run in runs] == [128, 128]
    assert runs[1]["weights of an unkilled run"] is True  # on a CPU
    assert all(run["executed, TFLOPs"] > 0 for run in runs)
    assert "| made | pass rate |" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_stages")
def test_the_example_with_a_language_model_runs_in_a_small_form(tmp_path: Path) -> None:
    policy, profile, run = check_killed_after(tmp_path, "smollm2", "policy")
    assert policy["tokens"] > 2000
    assert profile["share never solved"] == 1.0  # of a policy with random weights
    assert (run["run"], run["rollouts"], run["test pass@1"]) == ("grpo", 128, 0.0)


@pytest.mark.vllm
def test_vllm_is_measured(tmp_path: Path) -> None:
    measure("vllm", tmp_path / "vllm.json", small=True)
    initial, seeds, replaced, *rates = rows_of("vllm", tmp_path)
    assert initial["largest gap"] < 1e-3
    assert seeds["same completions, called again"]
    assert not seeds["with other seeds"]
    assert replaced["largest gap"] < 1e-3
    assert [row["rows"] for row in rates] == [4, 8]
    assert all(row["ratio"] > 0 for row in rates)
