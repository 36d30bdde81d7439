"""winnow recipes: the recipes that params.yaml can name, a line each; with a NAME its settings."""

import argparse
import importlib

from flows import roots
from flows.params import table
from tasks.common import params, recipes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print the settings of this one")
    roots.add_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the recipes, or one with everything that it is allocated and trained with."""
    values = params.load(roots.existing(options.data).params)
    if options.name:
        print(recipes.describe(options.name) or "of params.yaml")
        rows = importlib.import_module("tasks.code.origins").recipe_rows(values, options.name)
        print(table(rows))
        return 0
    names = recipes.names(values)
    own, width = recipes.own_recipes(values), max(len(name) for name in names)
    for name in names:
        what = "of params.yaml" if name in own else recipes.describe(name)
        print(f"{name:{width}}  {what}")
    return 0
