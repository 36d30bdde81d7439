"""winnow dag: the stages in the terminal. Each stage is below one stage that it depends on; the
others that it depends on follow `╾`. Edges implied by other edges are left out."""

import argparse

import networkx

from flows.cli import flags
from flows.pipeline import commands, roots


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    with commands.Dvc() as dvc:
        needs = roots.own_needs(roots.existing(options.data), dvc.graph())
    edges = [(before, stage) for stage, found in needs.items() for before in found]
    reduced = networkx.transitive_reduction(networkx.DiGraph(edges))
    networkx.write_network_text(networkx.DiGraph(sorted(reduced.edges)))
    return 0
