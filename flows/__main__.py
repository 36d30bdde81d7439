"""The `winnow` command, one word for each thing to do: `winnow --help`.

`python -m flows` is the same. Each word's module is imported when it is asked for."""

import argparse
import importlib
import os
import sys

from flows import commands, logs
from flows.selection import SelectionError
from tasks.common import process
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError

PASSED_ON = {
    "run": ("flows.pipeline", "bring the experiment up to date (python -m flows.pipeline)"),
    "serve": ("flows.serve", "the pipeline on a schedule (python -m flows.serve)"),
}
WORDS = {
    "init": "ask for model, data and GPU, and write them into params.yaml",
    "doctor": "everything that is wrong, before anything is run",
    "plan": "what would run, why, and what it would cost; runs nothing",
    "eval": "a policy on named benchmarks, by lm-evaluation-harness",
    "push": "a trained policy, with a model card, to a hub, a bucket or a folder",
    "params": "every value that the pipeline runs with, and where it is from",
    "recipes": "what params.yaml can name, or the settings of one",
    "read": "rollouts of a recipe, before and after training",
    "ui": "the pages of Prefect and MLflow, until Ctrl-C",
}
REFUSALS = (ParamsError, ArtifactError, SelectionError, commands.CommandError)


def parser_of(word: str | None) -> argparse.ArgumentParser:
    """The parser; only the module of `word` is imported for its options."""
    parser = argparse.ArgumentParser(
        prog="winnow", description="Prompts, rollouts and training, from profile to report."
    )
    parts = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for name, (_, text) in PASSED_ON.items():
        parts.add_parser(name, help=text, add_help=False)
    for name, text in WORDS.items():
        module = importlib.import_module(f"flows.{name}") if name == word else None
        part = parts.add_parser(
            name,
            help=text,
            description=module.__doc__ if module else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.add_options(part)
    return parser


def main() -> int:
    """The status of what was asked for; 1 with a message when it was refused, 130 when
    interrupted."""
    arguments = sys.argv[1:]
    word = arguments[0] if arguments else None
    if word in PASSED_ON:
        sys.argv = [f"winnow {word}", *arguments[1:]]
        return int(importlib.import_module(PASSED_ON[word][0]).main())
    options = parser_of(word).parse_args(arguments)
    logs.speak()
    process.interrupt_on_terminate()
    os.chdir(commands.ROOT)
    try:
        return int(importlib.import_module(f"flows.{options.word}").run(options))
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `winnow params | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return process.interrupted()


if __name__ == "__main__":
    sys.exit(main())
