"""winnow recipes [NAME]: lists the recipes that params.yaml can name, or the settings of one."""

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from flows.cli import flags
from flows.cli.params import table
from flows.pipeline import roots
from tasks.common import params, recipes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print the settings of this recipe")
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    values = params.load(roots.existing(options.data).params)
    if options.name:
        rows = importlib.import_module("tasks.code.origins").recipe_rows(values, options.name)
        print(what(values, options.name), table(rows), sep="\n")
        return 0
    rows = {name: (name, what(values, name)) for name in recipes.names(values)}
    apart = [rows.pop(path.stem) for path in sorted((recipes.FOLDER / "ablations").iterdir())]
    print(tabulate(rows.values(), tablefmt="plain"))
    print("\nablations: another recipe with one part changed")
    print(tabulate(apart, tablefmt="plain"))
    return 0


def what(values: Mapping[str, Any], name: str) -> str:
    return "of params.yaml" if name in recipes.own_recipes(values) else recipes.describe(name)
