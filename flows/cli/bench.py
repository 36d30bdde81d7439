"""winnow bench docs/results/protocol.yaml: compares recipes under equal tuning.

Runs the cells of the protocol that are missing from the results file beside it, two at a time,
without DVC or Prefect, and writes the tables. An interrupted benchmark resumes. Result lines from
older code or settings stay in the file; --supersede REASON marks them and runs nothing."""

import argparse
import logging
from pathlib import Path

from flows.cli import flags
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.processes import locks
from tasks.common.stage import StageError

logger = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("protocol", type=Path, metavar="PROTOCOL", help="file of the protocol")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: all recipes")
    parser.add_argument("--work", type=Path, default=Path("data/benchmark"), help="folder for runs")
    parser.add_argument("--data", type=Path, default=Path("data"), help="data root with the policy")
    parser.add_argument("--families", nargs="+", help="default: all families")
    parser.add_argument("--workers", type=flags.count(1), default=2, help="cells at the same time")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables")
    parser.add_argument(
        "--supersede", metavar="REASON", help="mark result lines of other code or settings"
    )


def run(options: argparse.Namespace) -> int:
    """Run the missing cells, or mark lines with --supersede. In any case, write the tables."""
    from flows.benchmark import results, runner, tables  # imports torch
    from flows.benchmark.protocol import read_protocol

    if not options.protocol.is_file():
        raise ParamsError(f"{options.protocol} is not a file: name the file of a protocol")
    if options.supersede is not None and not options.supersede.strip():
        raise ParamsError("--supersede needs a reason, which the page shows")
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s benchmark: %(message)s",
        datefmt="%H:%M:%S",
        force=True,  # in place of the handler for warnings
    )
    protocol, values = read_protocol(options.protocol)
    file = options.protocol.with_name(f"{options.protocol.stem}.jsonl")
    if options.supersede:
        runner.supersede_others(protocol, values, file, options.supersede)
    elif not options.tables:
        requested = protocol.only(options.families, options.recipes or None)
        with locks.exclusive(options.work / "lock", f"the benchmark in {options.work}"):
            hours = runner.expected_hours(requested, results.read_results(file), options.workers)
            logger.info("about %.1f hours remain, %d cells at a time", hours, options.workers)
            runner.prepare(requested, values, options.work, file, Layout(options.data))
            try:
                runner.run(requested, values, options.work, file, options.workers)
            except StageError as error:
                raise ParamsError(str(error)) from error
    tables.write_tables(protocol, values, file)
    return 0
