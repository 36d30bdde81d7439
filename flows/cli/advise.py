"""winnow advise: recommends a recipe, from the profile alone. It trains nothing and writes nothing.

It prints how many prompts have equal rewards, whether profiling pays, and what to run next. For
each recipe it prints the share of compute spent on the profile, the number of rollouts, the share
of rollouts in mixed groups, and the information per compute."""

import argparse
import importlib

from flows.cli import flags
from flows.pipeline import roots
from tasks.common.files import ArtifactError


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    root = roots.existing(options.data)
    if not (root.layout.profile / "profile.parquet").exists():
        command = f"winnow run{'' if root.is_main else f' --data {root.folder}'} --until profile"
        raise ArtifactError(f"{root.folder} has no profile yet: create it with `{command}`")
    advice = importlib.import_module("tasks.allocate.advice")
    print(*advice.advise(root.values, root.layout), sep="\n")
    return 0
