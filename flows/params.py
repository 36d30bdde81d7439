"""winnow params: every value that the pipeline runs with, and where it is from.

With --minimal params.yaml is printed without what is a default, comments kept:

    winnow params --minimal > shorter.yaml && mv shorter.yaml params.yaml"""

import argparse
import importlib
import json
from collections.abc import Iterable
from typing import Any

from flows import roots
from tasks.common import params


def add_options(parser: argparse.ArgumentParser) -> None:
    roots.add_option(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--minimal", action="store_true", help="the file without its defaults")
    shown.add_argument("--schema", action="store_true", help="the JSON schema of the file")


def run(options: argparse.Namespace) -> int:
    """Print the values, the shortened file, or the schema."""
    if options.schema:
        schema = importlib.import_module("tasks.code.schema").schema()
        print(json.dumps(schema, indent=1))
        return 0
    root, origins = roots.existing(options.data), importlib.import_module("tasks.code.origins")
    values = params.load(root.params)
    if options.minimal:
        print(origins.minimal(root.params.read_text()), end="")
    else:
        print(table(origins.rows(values)))
    return 0


def table(rows: Iterable[tuple[str, Any, str]]) -> str:
    """A line a value: its name, itself, where it is from."""
    shown = [(name, json.dumps(value, ensure_ascii=False), origin) for name, value, origin in rows]
    width = max(len(name) for name, _, _ in shown)
    return "\n".join(f"{name:{width}}  {origin:12} {value}" for name, value, origin in shown)
