"""The command `winnow`: `winnow --help` lists its subcommands.

`python -m flows` is the same command. Only the module of the given subcommand is imported."""

import argparse
import importlib
import importlib.metadata
import os
import re
import sys

import shtab

from flows import logs
from flows.pipeline import commands, summary
from flows.pipeline.selection import SelectionError
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.common.processes import ending

SUBCOMMANDS = {
    "init": "ask for model, data, GPU and budget, and write params.yaml or a new project",
    "doctor": "check for everything that can be wrong, before anything is run",
    "plan": "show what would run, why, and what it would cost; run nothing",
    "data": "show prompts as the policy receives them, with the verdict on their golds",
    "params": "list every value that the pipeline runs with, and its origin",
    "recipes": "list the recipes for params.yaml, or the settings of one",
    "run": "bring the experiment up to date",
    "serve": "run the pipeline on a schedule",
    "bench": "compare recipes at several budgets under equal tuning, by a protocol",
    "status": "show what runs now, since when and how far, or whether all is up to date",
    "read": "show rollouts of a recipe, before and after training, or of the profile",
    "ui": "serve the pages of Prefect and MLflow, until Ctrl-C",
    "export": "write a recipe's plan as training data of verl, TRL, and others",
    "grade": "grade the rollouts of other trainers, as a service",
    "import": "read the rollouts of other trainers back, and grade them again",
    "push": "publish a trained policy with a model card, or send a record to MLflow",
    "store": "inspect and maintain the rollout store",
    "clean": "show, and remove on request, what is old and not referenced",
}
TITLES = {"init": "start", "run": "run", "status": "look", "export": "share and maintain"}
COMPLETION = "--print-completion"
ELSEWHERE = {
    "serve": "flows.serve.schedule",
    "import": "flows.cli.read_back",
    "ui": "flows.serve.ui",
    "clean": "flows.upkeep.clean",
}
REFUSALS = (ParamsError, ArtifactError, SelectionError, commands.CommandError)


class Grouped(argparse.HelpFormatter):
    """Prints each of TITLES above its subcommand, the first of its group."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        if isinstance(action, argparse._SubParsersAction):
            for first, title in TITLES.items():
                text = re.sub(rf"^    {first} ", rf"\n  {title}:\n\g<0>", text, flags=re.MULTILINE)
        return text


def parser_of(subcommand: str | None) -> argparse.ArgumentParser:
    """Return the parser. Import only the module of `subcommand`, or all modules for COMPLETION."""
    parser = argparse.ArgumentParser(
        prog="winnow",
        description="Prompts, rollouts and training, from profile to report.",
        formatter_class=Grouped,
    )
    version = importlib.metadata.version("winnow")
    parser.add_argument("--version", action="version", version=f"winnow {version}")
    shtab.add_argument_to(parser, COMPLETION, help="print completion for this shell")
    parts = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for name, text in SUBCOMMANDS.items():
        path = ELSEWHERE.get(name, f"flows.cli.{name}")
        module = importlib.import_module(path) if subcommand in (name, COMPLETION) else None
        part = parts.add_parser(
            name,
            help=text,
            description=module.__doc__ if module else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.add_options(part)
            part.set_defaults(do=module.run)
    return parser


def enter_project(options: argparse.Namespace) -> None:
    """Change to the project. `run`, `init` and `bench` stay in the current folder, and `bench` and
    `init DIR` need no project. Raise CommandError as `require_project` does."""
    if options.subcommand != "bench" and not getattr(options, "folder", None):
        commands.require_project()
    if options.subcommand not in ("run", "init", "bench"):
        os.chdir(commands.ROOT)


def main() -> int:
    """Run the command. Return its exit status: 1 for bad input, 130 if interrupted."""
    arguments = sys.argv[1:]
    options = parser_of(arguments[0] if arguments else None).parse_args(arguments)
    logs.log_to_terminal()
    ending.interrupt_on_terminate()
    try:
        enter_project(options)
        return int(options.do(options))
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # as with `winnow params | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(options.subcommand == "run")  # a run may be incomplete
    except KeyboardInterrupt:
        print(f"interrupted; to resume: {summary.same_command()}", file=sys.stderr)
        return ending.interrupted()


if __name__ == "__main__":
    sys.exit(main())
