"""Compare the forecast of `winnow plan` with the seconds that stages take.

    python -m tests.bench.forecast [--runs 3] [--policies embedded llama] [--prompts 64]

Each run has an empty data root. `embedded` is the default experiment with the prompts and the
policy of `--data`; `llama` is a random Llama of 23 million parameters with `--prompts` prompts and
six steps. The stages run as processes of their own, one after another, on a CPU. A line is printed
for each stage and each state of knowledge: seconds forecast, seconds taken, and the ratio of the
larger to the smaller; then the medians. Three runs take about ten minutes on one core."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from flows.doctor.forecast import forecast
from flows.doctor.rates import probe
from tasks.code.effective import complete
from tasks.common.layout import Layout
from tasks.common.params import load
from tests.parameters import PROJECT
from tests.policies import CORPUS, bpe_tokenizer

TRAIN = ("train", "grpo", 0)
NUM_STEPS = 6
NUM_HELD_OUT = 16  # prompts of validation, and of test


def embedded(folder: Path, data: Path, _: int) -> dict[str, Any]:
    """Return the default experiment, with its prompts and policy copied to a new data root."""
    for name in ("prompts", "policy"):
        shutil.copytree(data / name, folder / "data" / name)
    shutil.copy(data / "policy.json", folder / "data")
    return load(PROJECT / "params.yaml")


def llama(folder: Path, _: Path, num_prompts: int) -> dict[str, Any]:
    """Make the random Llama and rows for `num_prompts` training prompts. Return parameters."""
    tokenizer = bpe_tokenizer(CORPUS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=7,
            num_attention_heads=8,
            max_position_embeddings=512,
            eos_token_id=1,
            bos_token_id=0,
        )
    )
    model.save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    num = num_prompts + 2 * NUM_HELD_OUT
    pairs = random.Random(0).sample([(a, b) for a in range(10, 99) for b in range(10, 99)], num)
    question = "Janet has {} apples and buys {} more. How many apples does she have?"
    rows = [{"question": question.format(a, b), "answer": str(a + b)} for a, b in pairs]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"prompt": "question", "answer": "answer", "level": None, "verifier": "has_e"}
    settings = {"path": str(folder / "rows.jsonl"), "name": "rows", **fields}
    return {
        "policy": {"source": str(folder / "llama")},
        "experiment": {"recipes": ["grpo"], "seeds": [0], "budget": None},
        "ingest": {
            "splits": {"train": num_prompts, "validation": NUM_HELD_OUT, "test": NUM_HELD_OUT},
            "contamination": {"overlap": None},
            "sources": [{"preset": "mapping", "settings": settings}],
        },
        "verify": {"verifiers": {"has_e": {"method": "regex", "pattern": "e", "match": "search"}}},
        "sampling": {"max_tokens": 48},
        "gates": {"min_solved_rate": 0.0, "max_truncated_rate": 1.0},
        "train": {"max_steps": NUM_STEPS, "validation": {"every_share": 0.5}},
    }


def seconds_of(folder: Path, name: str) -> float:
    """Run a stage, and return its seconds."""
    cell = ["--recipe", "grpo", "--seed", "0"] if name in ("allocate", "train") else []
    command = [sys.executable, "-m", f"tasks.{name}", *cell]
    places = ["--params", str(folder / "params.yaml"), "--data", str(folder / "data")]
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("a") as log:
        subprocess.run([*command, *places], check=True, stdout=log, stderr=log, env=environment)
    return time.perf_counter() - started


def compare(
    policy: str, data: Path, num_prompts: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (forecast, taken) seconds by stage and state of knowledge."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        values = {"embedded": embedded, "llama": llama}[policy](folder, data, num_prompts)
        (folder / "params.yaml").write_text(yaml.safe_dump(values))
        layout, whole = Layout(folder / "data"), complete(values)

        def expected(stage: tuple[Any, ...]) -> float:
            [cost], _ = forecast(whole, layout, [stage])
            assert cost is not None
            return 3600.0 * cost.hours.middle

        probe.cache_clear()
        first = {stage: expected(stage) for stage in (("profile", None, None), TRAIN)}
        for stage in ("ingest", "policy") if policy == "llama" else ():
            seconds_of(folder, stage)
        profile = seconds_of(folder, "profile")
        second = expected(TRAIN)
        seconds_of(folder, "allocate")
        train = seconds_of(folder, "train")
        found["profile", "before it"] = first["profile", None, None], profile
        found["train", "before the profile"] = first[TRAIN], train
        found["train", "after the profile"] = second, train
        found["train", "after a training"] = expected(TRAIN), train
        found["profile", "after it"] = expected(("profile", None, None)), profile
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="the forecast beside the seconds taken")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["embedded", "llama"])
    parser.add_argument("--data", type=Path, default=PROJECT / "data")
    parser.add_argument("--prompts", type=int, default=64, help="of llama")
    given = parser.parse_args()
    for policy in given.policies:
        runs = defaultdict(list)
        for _ in range(given.runs):
            for key, pair in compare(policy, given.data, given.prompts).items():
                runs[key].append(pair)
        for (stage, known), pairs in runs.items():
            for expected, taken in pairs:
                print(f"{policy:9} {stage:8} {known:19} {expected:7.1f} s {taken:7.1f} s")
            ratio = median(max(pair) / min(pair) for pair in pairs)
            print(f"{policy:9} {stage:8} {known:19} median ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
