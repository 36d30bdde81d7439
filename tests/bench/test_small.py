"""Run every benchmark in a small form, so that all work when their figures are needed.

The figures are not checked: seconds of a small form are meaningless."""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SMALL = {
    "advice": "--families hard --prompts 32",
    "against_trl": "--steps 2 --rollouts 16 --repeats 1 --warmup 1",
    "allocate_scale": "--prompts 1000",
    "budgets": "--recipes grpo --amount 5e9",
    "coverage": "--simulations 2 --seeds 2 --prompts 64",
    "engine_parity": "--engines hf hf --prompts 16",
    "engine_throughput": "--repeats 1 --prompts 8 --sides profile",
    "forecast": "--runs 1 --policies llama --prompts 4",
    "grading": "--answers 10 --programs 2 --repeats 1 --processes 1",
    "ingest_scale": "--rows 3 --near 3",
    "machine": "--steps 2 --rounds 1 --no-large --backend eager",
    "stopping": "",
    "store_scale": "--rollouts 2000 --repeats 1",
}
# run by test_contamination.py, by test_profile_scale.py, by tests/grading/test_agreement.py, by
# `make lint`, by tests/test_chain.py, and in parts by tests/profile/test_rescoring.py,
# tests/train/test_beliefs.py, test_blocks.py and test_first_look.py
ELSEWHERE = {
    *("agreement", "beliefs", "blocks", "contamination", "first_look", "measures"),
    *("profile_scale", "rescoring", "stage_start"),
}
NEEDS = {
    "engine_throughput": [pytest.mark.vllm],
    "grading": [pytest.mark.sandbox],
    "stopping": [pytest.mark.real_data],
}


def test_every_benchmark_is_listed() -> None:
    commands = {
        path.stem
        for path in FOLDER.glob("*.py")
        if not path.stem.startswith("test_") and '__name__ == "__main__"' in path.read_text()
    }
    assert commands == {*SMALL, *ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS.get(n, []), id=n) for n in SMALL])
def test_a_benchmark_runs(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if name == "against_trl" and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: `make bench` installs it")
    if name != "engine_throughput":  # it measures within its stage
        request.getfixturevalue("forked_stages")
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name].split()])
    try:
        importlib.import_module(f"tests.bench.{name}").main()
    finally:
        logging.disable(logging.NOTSET)
    printed = capfd.readouterr().out
    assert any(character.isdigit() for character in printed)
