"""winnow recipes: the recipes that params.yaml can name, a line each; with a NAME its settings."""

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

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
        rows = importlib.import_module("tasks.code.origins").recipe_rows(values, options.name)
        print(what(values, options.name), table(rows), sep="\n")
        return 0
    names = recipes.names(values)
    width = max(len(name) for name in names)
    for name in names:
        print(f"{name:{width}}  {what(values, name)}")
    return 0


def what(values: Mapping[str, Any], name: str) -> str:
    """A recipe in a line."""
    return "of params.yaml" if name in recipes.own_recipes(values) else recipes.describe(name)
