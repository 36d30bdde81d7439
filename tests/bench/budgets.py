"""Check whether every recipe spends the same: the compute of each on a budget, in a small world.

    python -m tests.bench.budgets --account executed --amount 3e9

Every recipe of params.yaml is planned and trained on the embedded policy, with one seed. Prints one
line per recipe: the compute of its profile and its training, relative to the amount, and the
difference in units of its own mean step. The status is 1 if that exceeds half a step."""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import polars as pl
import torch

from tasks.common import params, recipes
from tasks.common.checksums import read_checked
from tasks.common.layout import Layout
from tests.bench.identity import measure, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--account", default="executed")
    parser.add_argument("--amount", type=float, default=3e9)
    parser.add_argument("--recipes", nargs="*", help="only these")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    values = parameters(steps=1, staleness=0)
    values["train"]["max_steps"] = None
    values["experiment"]["budget"] = {"account": options.account, "amount": options.amount}
    budget = params.section(values, "experiment", params.Experiment).budget
    assert budget is not None
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder) / "data")
        names = options.recipes or recipes.names(values)
        found = measure(layout.root, values, names)
        for name in names:
            if "refused" in found[name]:
                print(f"{name:20} refused: its profile alone costs as much")
                continue
            spent = read_checked(layout.train(name, 0) / "flops.json")["budget"]
            num_steps = len(pl.read_parquet(layout.train(name, 0) / "steps.parquet"))
            step = (spent["spent"] - spent["profile"]) / num_steps
            off = (spent["spent"] - budget.amount) / step
            worst = max(worst, abs(off))
            share = spent["spent"] / budget.amount
            print(f"{name:20} {share:.4f} of the amount, {num_steps} steps, {off:+.2f} of a step")
    print(f"at most {worst:.2f} of a step apart from the amount")
    if worst > 0.5:
        sys.exit(1)


if __name__ == "__main__":
    main()
