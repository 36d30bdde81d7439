"""winnow params: every value that the pipeline runs with, and its origin."""

import argparse
import importlib
import json
from collections.abc import Iterable
from typing import Any

from tabulate import tabulate

from flows.cli import flags
from flows.pipeline import roots
from tasks.common import params
from tasks.common.redaction import without_secrets


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_root(parser)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the file")


def run(options: argparse.Namespace) -> int:
    if options.schema:
        schema = importlib.import_module("tasks.code.schema").schema()
        print(json.dumps(schema, indent=1))
        return 0
    root, origins = roots.existing(options.data), importlib.import_module("tasks.code.origins")
    values = params.load(root.params)
    print(table(origins.rows(values)))
    return 0


def table(rows: Iterable[tuple[str, Any, str]]) -> str:
    shown = [(name, origin, json.dumps(value, ensure_ascii=False)) for name, value, origin in rows]
    return without_secrets(str(tabulate(shown, tablefmt="plain", disable_numparse=True)))
