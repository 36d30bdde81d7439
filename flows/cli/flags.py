"""Flags that several subcommands share, with the same meaning in each."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flows.pipeline.request import FlowRequest
from flows.pipeline.roots import MAIN
from tasks.common import params
from tasks.common.redaction import has_credentials


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", default=MAIN, metavar="DIR", help="a data root (default: %(default)s)"
    )


def add_cell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="default: the experiment's first")
    add_root(parser)


def seed_of(options: argparse.Namespace, values: Mapping[str, Any]) -> int:
    if options.seed is not None:
        return int(options.seed)
    return params.section(values, "experiment", params.Experiment).seeds[0]


def location(text: str) -> str:
    """Make a path absolute and expand `~`, also after `sqlite:///`, because commands change the
    current folder. Return addresses such as s3://bucket unchanged; refuse one with credentials."""
    if has_credentials(text):
        raise argparse.ArgumentTypeError("the address contains credentials: remove them")
    path = text.removeprefix("sqlite:///")
    if "://" in path:
        return text
    return text.removesuffix(path) + str(Path(path).expanduser().resolve())


def count(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers that are at least `least`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def add_several(parser: argparse.ArgumentParser, flag: str, **more: Any) -> None:
    parser.add_argument(flag, action="extend", nargs="+", default=[], **more)


def add_request(parser: argparse.ArgumentParser) -> None:
    only = "only these recipes of the experiment"
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=only)
    add_several(parser, "--seed", dest="seeds", metavar="N", type=int, help="only these seeds")
    until = "only these stages, and what they need: profile, train, train@grpo-0"
    add_several(parser, "--until", metavar="STAGE", help=until)
    add_several(parser, "--force", metavar="STAGE", help="run these stages even if nothing changed")
    values = "values of params.yaml for this time only: train.learning_rate=1e-4"
    add_several(parser, "--set", dest="overrides", metavar="KEY=VALUE", help=values)
    add_root(parser)


def add_run(parser: argparse.ArgumentParser, concurrency: int, retries: int) -> None:
    """Add the flags of a command that runs stages. `concurrency` and `retries` are defaults."""
    add_request(parser)
    for flag, least, default, text in (
        ("--concurrency", 1, concurrency, "stages that may run at the same time"),
        ("--retries", 0, retries, "retries of a failed stage"),
    ):
        text += " (default: %(default)s)"
        parser.add_argument(flag, type=count(least), default=default, metavar="N", help=text)


def request_of(options: argparse.Namespace) -> FlowRequest:
    names = {one.name for one in fields(FlowRequest)}
    return FlowRequest(**{name: value for name, value in vars(options).items() if name in names})
