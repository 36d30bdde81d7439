"""Check whether every recipe spends the same: the compute of each on a budget, in a small world.

    python -m tests.bench.budgets --account executed --amount 3e9

Every recipe of params.yaml is planned and trained on the embedded policy, with one seed. Prints one
line per recipe: the compute of its profile and its training, relative to the amount, and the
difference in units of its own mean step. The status is 1 if that exceeds two steps."""

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import torch

from flows.benchmark.cells import run_stage
from tasks.common import params, recipes
from tasks.common.checksums import read_checked
from tasks.common.layout import Layout
from tasks.policy.source import EMBEDDED
from tests.bench.world import PROJECT, place_embedded


def settings(account: str, amount: float) -> dict[str, Any]:
    """Return the values of params.yaml for a small world."""
    values = params.load(PROJECT / "params.yaml")
    for name in ("profile", "allocate", "engine", "store"):
        values.setdefault(name, {})
    values["experiment"]["budget"] = {"account": account, "amount": amount}
    values["ingest"]["splits"] = {"train": 64, "validation": 8, "test": 8}
    values["profile"]["num_samples"] = 4
    values["allocate"]["passes"] = 1
    values["engine"] |= {"name": "hf", "device": "cpu"}
    values["store"]["location"] = None
    values["gates"] = {"min_solved_rate": 0.0, "max_truncated_rate": 1.0}
    itself = {"train": {"reference": {"source": str(EMBEDDED.policy)}}}
    values["recipes"] = {**(values.get("recipes") or {}), "distil": itself}  # no teacher is here
    return values


def spend(layout: Layout, values: dict[str, Any], recipe: str, amount: float) -> float:
    """Plan and train a recipe, and print and return its distance from the amount, in steps."""
    try:
        run_stage("allocate", values, layout, recipe, 0)
        run_stage("train", values, layout, recipe, 0)
    except params.ParamsError as error:
        print(f"{recipe:20} refused: {error}")
        return 0.0
    out = layout.train(recipe, 0)
    spent = read_checked(out / "flops.json")["budget"]
    num_steps = len(pl.read_parquet(out / "steps.parquet"))
    off = (spent["spent"] - amount) * num_steps / (spent["spent"] - spent["profile"])
    share = spent["spent"] / amount
    print(f"{recipe:20} {share:.4f} of the amount, {num_steps} steps, {off:+.2f} of a step")
    return abs(float(off))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--account", default="executed")
    parser.add_argument("--amount", type=float, default=3e9)
    parser.add_argument("--recipes", nargs="*", help="only these")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    values = settings(options.account, options.amount)
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder) / "data")
        place_embedded(layout)
        for name in ("ingest", "profile"):
            run_stage(name, values, layout)
        names = options.recipes or recipes.names(values)
        worst = max(spend(layout, values, name, options.amount) for name in names)
    print(f"at most {worst:.2f} of a step apart from the amount")
    if worst > 2.0:
        sys.exit(1)


if __name__ == "__main__":
    main()
