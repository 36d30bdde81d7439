"""winnow status: which run is in which stage, since when, and how far; without a run, whether all
stages are up to date."""

import argparse

from flows.cli import plan
from flows.pipeline import commands, roots, status
from flows.pipeline.stages import changes_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add none."""


def run(options: argparse.Namespace) -> int:
    """Print the state. Return 0."""
    if text := status.now():
        print(text)
        return 0
    root = roots.Root()
    with commands.Dvc() as dvc:
        needs = roots.own_needs(root, dvc.graph())
        changed = changes_of(dvc, root, root.pipeline)
    stale = plan.why(root, needs, changed, plan.cells_of(root.values), set())
    late = f"{len(stale)} of {len(needs)} stages would or may run: `winnow plan` lists them"
    print(f"nothing runs; {late if stale else f'all {len(needs)} stages are up to date'}")
    return 0
