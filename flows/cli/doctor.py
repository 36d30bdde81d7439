"""winnow doctor: checks everything that can be wrong before any compute is spent.

It checks the parameters (with all slots of the chosen recipes), the model, the data, the store, the
record, the disk and the GPU memory. It reads the first few rows of every source, and downloads no
model. The flow makes the same checks before the first stale stage."""

import argparse

from flows.cli import costs, flags
from flows.doctor.health import findings, listed
from flows.pipeline import roots


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_root(parser)
    costs.add_price(parser)
    costs.add_look(parser)


def run(options: argparse.Namespace) -> int:
    """Print the faults and return 1; without faults, print what the budget buys and return 0."""
    from flows.doctor.forecast import refusals  # takes two seconds

    root = roots.existing(options.data)
    health = findings(root)
    for remark in health.remarks:
        print(f"note: {remark}")
    if not health.errors:
        values = root.values
        recipes = values["experiment"]["recipes"]
        health.errors.extend(refusals(values, root.layout, recipes, certain=False))
    if health.errors:
        print(listed(health.errors))
        return 1
    print("nothing is wrong: parameters, recipes, model, data, store, record, disk and GPU memory")
    print(costs.bought(values, root.layout, recipes, options.price))
    if found := costs.look(options, values, root.layout):
        print(found)
    return 0
