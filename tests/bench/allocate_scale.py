"""Time allocation for millions of prompts, beside one scan and one write of the same bytes.

    python -m tests.bench.allocate_scale [--prompts 10000000] [--recipe sgpo] [--passes 1]

Makes a profile (eight samples per prompt, pass rates from Beta(0.6, 0.6)) and runs `python -m
tasks.allocate` on it in a separate process. For comparison, another process only scans that profile
and writes the resulting plan and decisions. The ratio compares seconds above the start-up time.
Start-up is the allocation of a thousand prompts, which also opens the tracking database and draws
the interval of the judgement, and a Python that imports Polars."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from tasks.common.artifacts import DECISIONS, OUTCOMES, PLAN, PROFILE, Layout
from tasks.policy.source import EMBEDDED
from tests.bench.peak import peak_of
from tests.bench.world import PROJECT

NUM_SAMPLES = 8
COPY = (
    "import sys, polars as pl\n"
    "profile, plan, decisions = sys.argv[1:]\n"
    "pl.scan_parquet(profile).collect()\n"
    "for path in (plan, decisions):\n"
    "    pl.scan_parquet(path).collect().write_parquet(path + '.copy', compression='zstd')\n"
)
FEW = 1_000


def make_profile(num_prompts: int) -> pl.DataFrame:
    """Return a PROFILE table of synthetic counts."""
    rng = np.random.default_rng(0)
    correct = rng.binomial(NUM_SAMPLES, rng.beta(0.6, 0.6, num_prompts)).astype(np.int32)
    numbers = np.arange(num_prompts, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    counts = {
        **dict.fromkeys(OUTCOMES, pl.lit(0, pl.Int32)),
        "correct": pl.Series(correct),
        "wrong": pl.Series(NUM_SAMPLES - correct),
    }
    rate = pl.col("correct") / NUM_SAMPLES
    profile = pl.DataFrame({"number": numbers}).select(
        prompt_id=pl.format("p{}", "number"),
        num_samples=pl.lit(NUM_SAMPLES, pl.Int32),
        **counts,
        prompt_tokens=pl.lit(100, pl.Int32),
        completion_tokens=pl.Series(rng.integers(800, 8000, num_prompts)),
        completion_tokens_max=pl.lit(1000, pl.Int32),
        truncated_rate=pl.lit(0.0),
    )
    profile = profile.with_columns(
        pass_rate=rate, pass_rate_unbiased=rate, pass_rate_low=rate * 0.5, pass_rate_high=rate
    )
    return PROFILE.check(profile.select(list(PROFILE.columns)), "the benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000_000)
    parser.add_argument("--recipe", default="sgpo")
    parser.add_argument("--passes", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder))
        values = yaml.safe_load((PROJECT / "params.yaml").read_text())
        values["allocate"]["passes"] = options.passes
        values["experiment"]["budget"] = None  # a budget reads the profile's rollouts as well
        (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
        layout.policy_card.write_bytes(EMBEDDED.policy_card.read_bytes())
        profile = layout.profile / "profile.parquet"
        out = layout.plan(options.recipe, 0)
        paths = ["--params", str(layout.root / "params.yaml"), "--data", str(layout.root)]
        recipe = ["--recipe", options.recipe, "--seed", "0"]
        plan, decisions = out / "plan.parquet", out / "decisions.parquet"
        allocate = ["-m", "tasks.allocate", *paths, *recipe]
        copy = ["-c", COPY, str(profile), str(plan), str(decisions)]
        PROFILE.write(profile, make_profile(FEW))
        peak_of(allocate)  # makes the tracking database
        starts = {"allocate": peak_of(allocate), "scan and write": peak_of(["-c", "import polars"])}
        PROFILE.write(profile, make_profile(options.prompts))
        seconds = {}
        for what, line in (("allocate", allocate), ("scan and write", copy)):
            spent, start = peak_of(line), starts[what].seconds
            seconds[what] = spent.seconds - start
            took = f"{seconds[what]:6.1f} s above a start of {start:.1f} s"
            print(f"{what:>16}: {took}, {spent.megabytes:7,.0f} MB", flush=True)
        print(
            f"{options.prompts:,} prompts, {len(PLAN.read(plan)):,} visits, "
            f"{len(DECISIONS.read(decisions)):,} decisions: "
            f"{seconds['allocate'] / seconds['scan and write']:.1f} times as long"
        )


if __name__ == "__main__":
    main()
