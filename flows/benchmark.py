"""python -m flows.benchmark docs/results/protocol.yaml: which recipe pays, tuned alike.

Runs what the protocol asks for and the results file beside it lacks, two cells at a time, without
DVC or Prefect around each, and writes the tables. It goes on where it was stopped. Lines of code or
settings that have changed since stay in the file: --supersede REASON marks them, and runs nothing.
"""

import argparse
import importlib
import logging
import sys
from pathlib import Path

from tasks.common import params, process
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.stage import StageError

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("protocol", type=Path, help="the protocol's file")
    parser.add_argument("--work", type=Path, default=Path("data/benchmark"), help="a work folder")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where the policy is")
    parser.add_argument("--families", nargs="+", help="run these families alone; by default all")
    parser.add_argument("--recipes", nargs="+", help="run these recipes alone; by default all")
    parser.add_argument("--workers", type=int, default=2, help="cells at a time")
    parser.add_argument("--shared", help="a folder or s3://bucket/prefix that other machines use")
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    parser.add_argument(
        "--supersede", metavar="REASON", help="mark lines of other code or settings"
    )
    parser.add_argument("--readme", type=Path, help="a page whose short table is written, too")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s benchmark: %(message)s", datefmt="%H:%M:%S"
    )
    process.interrupt_on_terminate()
    try:
        run(options)
    except KeyboardInterrupt:
        logger.warning("stopped; run the same command again to go on")
        return process.interrupted()
    except (params.ParamsError, ArtifactError, StageError) as error:
        logger.error("%s", error)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    """Run the missing cells, then write the tables."""
    # flows import no stage: the benchmark is loaded by name, as the stages are
    part = {
        name: importlib.import_module(f"tasks.benchmark.{name}")
        for name in ("protocol", "runner", "results", "sharing", "tables")
    }
    protocol, values = part["protocol"].read_protocol(options.protocol)
    file = options.protocol.with_name(f"{options.protocol.stem}.jsonl")
    if options.readme:
        part["tables"].split_readme(options.readme)  # not only after hours
    if options.supersede:
        part["runner"].supersede_others(protocol, values, file, options.supersede)
    elif not options.tables:
        params.at_least(1, workers=options.workers)
        runner = part["runner"]
        asked = protocol.only(options.families, options.recipes)
        with process.exclusive(options.work / "lock", f"the benchmark in {options.work}"):
            results = part["results"].read_results(file)
            hours = runner.expected_hours(asked, results, options.workers)
            logger.info("about %.1f hours are left, %d cells at a time", hours, options.workers)
            runner.prepare(asked, values, options.work, file, Layout(options.data))
            sharing, shared = part["sharing"], None
            if options.shared:
                shared = sharing.Shared(options.shared, sharing.owner_of(options.work))
            runner.run(asked, values, options.work, file, options.workers, shared)
    part["tables"].write_tables(protocol, values, file)
    if options.readme:
        part["tables"].write_readme(protocol, values, file, options.readme)


if __name__ == "__main__":
    sys.exit(main())
