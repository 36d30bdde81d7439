"""python -m tasks.train --recipe R --seed S: train the initial policy along the recipe's plan."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from tasks.common.processes import ending


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for interactive use; a pipeline does not need it."""
    parser.add_argument(
        "--resume", type=Path, help="resume from this checkpoint folder of the same run"
    )


def launch_ranks(options: argparse.Namespace) -> None:
    """Run a cluster's ranks, or several local ranks with torchrun, in place of this process, if
    params.yaml requests them and this is no rank itself. The stage reports errors in that file."""
    if "RANK" in os.environ:
        return
    from tasks.common import params
    from tasks.common.layout import Layout
    from tasks.engines.settings import EngineSettings
    from tasks.train.learner import ranks

    try:
        engine = params.section(params.load(options.params), "engine", EngineSettings)
    except params.ParamsError:
        return
    if engine.cluster != "local":
        from tasks.engines.cluster.ranks import run_ranks
        from tasks.models.policy import read_policy

        arguments = ["tasks.train", *sys.argv[1:]]
        layout = Layout(options.data)

        def progress() -> list[str]:
            return sorted(path.name for path in layout.checkpoints.glob("*/step-*"))

        policy, lost = partial(read_policy, layout), ranks.LOST_RANK
        logs = layout.engine_logs(f"train@{options.recipe}-{options.seed}")
        sys.exit(run_ranks(engine, engine.cluster, arguments, lost, progress, policy, logs))
    ranks.launch_ranks("tasks.train", sys.argv[1:], engine.num_processes)


if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.train.run", of_cell=True, options=add_options, before=launch_ranks)
