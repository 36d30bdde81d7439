"""Whether scoring can refresh a profile: a trained policy scores the stored rollouts of the initial
one, and pass rates follow by self-normalised importance weights.

    python -m tests.bench.rescoring --data data --cell grpo/0 [--prompts 256] [--truth 32]

Of a prompt's n rollouts, each has w = exp(its log-ratio); the estimate is sum(w r) / sum(w), and
the effective size (sum w)^2 / sum(w^2). A prompt is sampled again if (a) its rewards are equal, (b)
the effective size is below n / 2, or (c) the mean weight is outside 0.7 to 1.43. Prints the share
of prompts by condition, seconds, and the root mean squared error against --truth new samples of
the trained policy, without their noise: of the old profile, of the estimate, of the estimate with
the named prompts sampled again, and of n new samples for every prompt."""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout
from tasks.common.params import load, section, sections
from tasks.grading.settings import Verify
from tasks.models.policy import Policy, load_model, load_tokenizer, read_policy, read_trained
from tasks.models.prompts import encode_prompts
from tasks.profile.run import sample
from tasks.profile.settings import ProfileSettings
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts, read_tokens

Floats = npt.NDArray[np.float64]
Values = Mapping[str, Any]
BATCH = 32
BOUNDS = (0.7, 1.43)
KEYS = ["prompt_id", "sample_index", "outcome"]


@torch.no_grad()
def scores(
    policy: Policy, texts: Sequence[tuple[list[int], list[int]]], temperature: float
) -> tuple[Floats, float]:
    """Return the log-probability of each completion after its prompt, and the seconds it took."""
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    started, found = time.perf_counter(), np.zeros(len(texts))
    order = np.argsort([len(prompt) + len(completion) for prompt, completion in texts])
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH].tolist()
        whole = [torch.tensor([*texts[row][0], *texts[row][1]]) for row in rows]
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            for part in (whole, [torch.ones_like(each) for each in whole])
        )
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float() / temperature
        chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        for place, row in enumerate(rows):
            prompt, completion = texts[row]
            part = chosen[place, len(prompt) - 1 : len(prompt) - 1 + len(completion)]
            found[row] = float(part.sum())
    return found, time.perf_counter() - started


def sampled(
    prompts: pl.DataFrame, policy: Policy, number: int, layout: Layout, values: Values
) -> tuple[pl.DataFrame, float]:
    """Return rollouts of the policy with their outcomes, and the seconds of sampling."""
    stored = StoredRollouts(
        *(prompts, policy, number, sections(values, SamplerSettings), layout),
        cell="bench",
        greedy=False,
    )
    with tempfile.TemporaryDirectory(dir=layout.root) as folder:
        sample(stored, ProfileSettings(number), section(values, "verify", Verify), Path(folder))
        rows = ROLLOUTS.read_columns(Path(folder) / "rollouts.parquet", KEYS)
    return rows, float(stored.costs()["seconds"].sum())


def rates(prompts: pl.DataFrame, rows: pl.DataFrame) -> Floats:
    """Return the pass rate of each prompt."""
    found = rows.group_by("prompt_id").agg(rate=(pl.col("outcome") == "correct").mean())
    joined = prompts.join(found, on="prompt_id", maintain_order="left")
    return np.asarray(joined["rate"].to_numpy(), dtype=np.float64)


def weighed(prompts: pl.DataFrame, rows: pl.DataFrame, log_ratios: Floats) -> pl.DataFrame:
    """Return per prompt n, k, the `estimate`, the effective `size` and the `mean` weight."""
    table = rows.with_columns(
        w=pl.Series(np.exp(np.clip(log_ratios, -20, 20))),
        r=(pl.col("outcome") == "correct").cast(pl.Float64),
    )
    w, r = pl.col("w"), pl.col("r")
    found = table.group_by("prompt_id").agg(
        n=pl.len(),
        k=r.sum(),
        estimate=(w * r).sum() / w.sum(),
        size=w.sum() ** 2 / (w**2).sum(),
        mean=w.mean(),
    )
    return prompts.select("prompt_id").join(found, on="prompt_id", maintain_order="left")


def error(estimates: Floats, truth: Floats, number: int) -> float:
    """Return the root mean squared error, without the noise of a truth of `number` samples."""
    noise = truth * (1 - truth) / (number - 1)
    return max(float(np.mean((estimates - truth) ** 2 - noise)), 0.0) ** 0.5


def compare(
    layout: Layout, values: Values, prompts: pl.DataFrame, policies: tuple[Policy, Policy], num: int
) -> None:
    before, after = policies
    table = ROLLOUTS.read_columns(layout.profile / "rollouts.parquet", KEYS)
    sampler, number = sections(values, SamplerSettings), len(table) // table["prompt_id"].n_unique()
    rows = read_tokens(prompts, before, number, sampler, layout)
    rows = rows.join(table.filter(pl.col("outcome") != "error"), on=KEYS[:2])
    tokenizer = load_tokenizer(before.folder)
    encoded = encode_prompts(prompts, tokenizer, before, sampler.sampling.max_tokens)
    by_id = dict(zip(prompts["prompt_id"], encoded, strict=True))
    texts = [(by_id[name], ids) for name, ids in rows.select("prompt_id", "token_ids").rows()]
    scored = [scores(each, texts, sampler.sampling.temperature) for each in policies]
    log_ratios, scoring = scored[1][0] - scored[0][0], scored[1][1]
    found = weighed(prompts, rows, log_ratios)
    n, k, estimate, size, mean = (found[name].to_numpy() for name in found.columns[1:])
    equal, few = (k == 0) | (k == n), size < n / 2
    off = (mean < BOUNDS[0]) | (mean > BOUNDS[1])
    again = equal | few | off
    drawn, seconds = sampled(prompts, after, number + num, layout, values)
    fresh = rates(prompts, drawn.filter(pl.col("sample_index") < number))
    truth = rates(prompts, drawn.filter(pl.col("sample_index") >= number))
    sampling = seconds * len(rows) / len(drawn)
    print(f"{len(found)} prompts with {number} rollouts; mean log-ratio {log_ratios.mean():.3f}")
    print(f"sampled again: {again.mean():.1%} of the prompts (equal rewards {equal.mean():.1%})")
    print(f"of those with different rewards: effective size {few[~equal].mean():.1%}, mean weight")
    print(f"{off[~equal].mean():.1%}, either {again[~equal].mean():.1%}")
    print(f"seconds: scoring {scoring:.1f}; sampling as many {sampling:.1f}; scoring and sampling")
    print(f"again {scoring + again.mean() * sampling:.1f}")
    for name, estimates in (
        ("the old profile", k / n),
        ("scoring", estimate),
        ("scoring, and sampling again", np.where(again, fresh, estimate)),
        ("a new profile", fresh),
    ):
        print(f"error of {name}: {error(estimates, truth, num):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a data root with a profile")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--cell", required=True, help="a trained cell, such as grpo/0")
    parser.add_argument("--prompts", type=int, default=256, help="random training prompts")
    parser.add_argument("--truth", type=int, default=32, help="new samples of a prompt")
    options = parser.parse_args()
    layout, values = Layout(options.data.resolve()), load(options.params)
    recipe, _, seed = options.cell.partition("/")
    every = PROMPTS.read(layout.prompts("train"))
    prompts = every.sample(min(options.prompts, len(every)), seed=0)
    policies = read_policy(layout), read_trained(layout, recipe, int(seed))
    compare(layout, values, prompts, policies, options.truth)


if __name__ == "__main__":
    main()
