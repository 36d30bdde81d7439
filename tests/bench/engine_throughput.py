"""python -m tests.bench.engine_throughput: the overhead of profiling over the bare engine, in
tokens per second.

Both sides draw the same number of samples of the same prompts with vLLM on this machine,
alternating and in separate processes: `LLM.generate` alone, and the stage `profile` (rendering,
store, grading, tables). The measurement runs from the ready engine to the end of the stage, in wall
and CPU seconds (cores may be shared), including the verifier's process. The bare engine runs in two
forms: with the requests of profiling (a seed per sample, no log-probabilities), and as used for
text only (n samples per prompt, no seeds)."""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from tasks.common import params, stage
from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout
from tasks.engines.engine import Request, sample_seed
from tasks.engines.loading import load_engine
from tasks.engines.settings import EngineSettings, Sampling
from tasks.engines.vllm import VllmEngine
from tasks.models.policy import load_tokenizer, read_policy
from tasks.store import sampling
from tasks.store.folder import prompt_digest
from tests.bench.peak import in_new_process
from tests.bench.world import make_world

SIDES = ("bare", "same_requests", "profile")
CLOCKS = ("wall", "cpu")


def bare(layout: Layout, values: dict[str, Any], *, same_requests: bool) -> dict[str, float]:
    """Return tokens and seconds of `LLM.generate` on the training prompts."""
    policy, sampling = read_policy(layout), params.section(values, "sampling", Sampling)
    engine = load_engine(params.section(values, "engine", EngineSettings), policy)
    assert isinstance(engine, VllmEngine)
    texts, tokenizer = (
        PROMPTS.read(layout.prompts("train"))["prompt"],
        load_tokenizer(policy.folder),
    )
    prompts = [tokenizer(text).input_ids for text in texts]
    num, make = values["profile"]["num_samples"], engine.vllm.inputs.TokensPrompt
    started = now()
    if same_requests:
        names = [(prompt_digest(ids), index) for ids in prompts for index in range(num)]
        seeds = [sample_seed(sampling.seed, *name) for name in names]
        counts = [num] * len(prompts)
        requests = engine.sampling_params(Request(prompts, counts, seeds, sampling, False))
        inputs = [make(prompt_token_ids=ids) for ids in prompts for _ in range(num)]
    else:
        (plain,) = engine.sampling_params(Request(prompts[:1], [1], [0], sampling, False))
        plain.n, plain.seed = num, None
        requests, inputs = [plain] * len(prompts), [make(prompt_token_ids=ids) for ids in prompts]
    outputs = engine.llm.generate(inputs, requests, use_tqdm=False)
    return {
        "tokens": sum(len(o.token_ids) for output in outputs for o in output.outputs),
        **since(started),
    }


def profile(layout: Layout, values: dict[str, Any]) -> dict[str, float]:
    """Return tokens and seconds of the stage, without the start of its engine."""
    ready: list[tuple[float, float]] = []

    def load(*arguments: Any, **named: Any) -> Any:
        engine = load_engine(*arguments, **named)
        ready.append(now())
        return engine

    sampling.load_engine = load  # type: ignore[attr-defined]
    sys.argv = ["profile", "--params", str(layout.root / "params.yaml"), "--data", str(layout.root)]
    try:
        stage.run("tasks.profile.run")
    except SystemExit as ended:
        if ended.code:
            raise
    spent = since(ready[0])
    graded = ROLLOUTS.read(layout.profile / "rollouts.parquet")
    return {"tokens": int(graded["completion_tokens"].sum()), **spent}


def now() -> tuple[float, float]:
    """Return wall and CPU seconds of this process and its finished children."""
    times = os.times()
    return times.elapsed, times.user + times.system + times.children_user + times.children_system


def since(started: tuple[float, float]) -> dict[str, float]:
    wall, cpu = now()
    return {"wall": wall - started[0], "cpu": cpu - started[1]}


def measure(side: str, root: Path) -> dict[str, float]:
    """Return one measurement."""
    layout, values = Layout(root), params.load(root / "params.yaml")
    torch.set_num_threads(values["engine"]["threads"])
    if side == "profile":
        return profile(layout, values)
    return bare(layout, values, same_requests=side != "bare")


def run_side(side: str, root: Path, number: int) -> dict[str, float]:
    """Return tokens per second of one side, by wall and by CPU time, with an empty store."""
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["store"]["location"] = str(root / f"store-{number}")
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    result = in_new_process(measure, side, root)
    rates = {clock: result["tokens"] / result[clock] for clock in CLOCKS}
    words = ", ".join(
        f"{result[clock]:6.2f} s {clock} ({rates[clock]:7,.0f} tokens/s)" for clock in CLOCKS
    )
    print(f"  {side:14} {result['tokens']:9,.0f} tokens: {words}", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prompts = make_world(root, steps=1).prompts("train")
        PROMPTS.write(prompts, PROMPTS.read(prompts).head(chosen.prompts))
        values = yaml.safe_load((root / "params.yaml").read_text())
        values["engine"] |= {"name": "vllm", "max_rows": chosen.max_rows}
        (root / "params.yaml").write_text(yaml.safe_dump(values))
        rates: dict[str, list[dict[str, float]]] = {side: [] for side in chosen.sides}
        for repeat in range(chosen.repeats):
            for number, side in enumerate(rates):
                rates[side].append(run_side(side, root, repeat * len(SIDES) + number))
    for other in [side for side in rates if side != "profile"]:
        for clock in CLOCKS:
            pairs = zip(rates["profile"], rates[other], strict=True)
            ratios = sorted(mine[clock] / theirs[clock] for mine, theirs in pairs)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} runs"
            print(f"profile against {other}, {clock}: {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
