"""python -m tests.bench.engine_parity: how often `hf` and `vllm` give the same greedy completions
with the embedded policy.

Float32 on this machine. If two tokens are equally likely up to the last bits, rounding decides, and
the rest of the completion differs. The log-probabilities are compared up to that point."""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch
import yaml

from tasks.common import params
from tasks.common.artifacts import PROMPTS
from tasks.engines.engine import Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.settings import EngineSettings, Sampling
from tasks.models.policy import load_tokenizer, read_policy
from tests.bench.world import make_world

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def compare(one: Samples, other: Samples) -> tuple[int, float]:
    """Return the number of equal completions, and the largest difference of log-probabilities
    before two completions diverge."""
    equal, largest = 0, 0.0
    for row, (mine, theirs) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        equal += mine == theirs
        for place, (token, twin) in enumerate(zip(mine, theirs, strict=False)):
            if token != twin:
                break
            largest = max(largest, abs(one.logprobs[row][place] - other.logprobs[row][place]))
    return equal, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs=2, default=["hf", "vllm"])
    parser.add_argument("--prompts", type=int, default=1024, help="the first ones of training")
    options = parser.parse_args()
    names = options.engines
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        layout = make_world(Path(folder), steps=1)
        values = yaml.safe_load((Path(folder) / "params.yaml").read_text())
        policy, settings = read_policy(layout), params.section(values, "engine", EngineSettings)
        sampling = dataclasses.replace(params.section(values, "sampling", Sampling), **GREEDY)
        tokenizer = load_tokenizer(policy.folder)
        texts = PROMPTS.read(layout.prompts("train"))["prompt"].head(options.prompts)
        prompts = [tokenizer(text).input_ids for text in texts]
        num, samples = len(prompts), []
        for name in names:
            engine = load_engine(dataclasses.replace(settings, name=name), policy)
            samples.append(engine.generate(Request(prompts, [1] * num, [0] * num, sampling)))
            del engine
    equal, largest = compare(*samples)
    print(
        f"{names[0]} and {names[1]}: identical tokens on {equal} of {num} prompts "
        f"({100 * equal / num:.2f} %)"
    )
    print(f"largest difference of a log-probability: {largest:.2g}")


if __name__ == "__main__":
    main()
