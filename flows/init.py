"""winnow init: asks for the model, the data and the GPU, and writes them into params.yaml.

What is given as an option is not asked. All else in the file stays as it is, comments included. A
file with changes that are not committed is written only after a yes, or with --overwrite."""

import argparse
import subprocess
import sys
from typing import Any

from flows import commands, doctor
from flows.roots import Root
from tasks.common.editing import set_values
from tasks.common.files import write_text
from tasks.common.params import ParamsError

FILE = commands.ROOT / "params.yaml"
PRESETS = ("gsm8k", "math", "svamp", "openai_chat", "verl", "apps", "mbpp", "ifeval")
"""Presets whose only setting is the path of a file."""

EMBEDDED = "embedded"
YES_NO = ("yes", "no")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="tiny, a folder, or hf://org/name@revision")
    parser.add_argument("--max-tokens", type=int, help="of a completion")
    parser.add_argument("--data", help=f"{EMBEDDED}, or a file: a path, s3://, hf:// or https://")
    parser.add_argument("--preset", choices=PRESETS, help="how the file is read")
    parser.add_argument("--gpu", choices=YES_NO, help="whether to sample and train on one")
    parser.add_argument("--overwrite", action="store_true", help="write over changes, unasked")


def run(options: argparse.Namespace) -> int:
    """Ask, write, and say what the doctor finds: its status, or 1 when nothing was written."""
    text = FILE.read_text()
    changed = set_values(text, answers(options))
    if changed == text:
        print("params.yaml says this already")
        return 0
    if not options.overwrite and is_modified():
        what = "params.yaml has changes that are not committed. Write into it?"
        if ask(what, "no", YES_NO) == "no":
            print("nothing was written", file=sys.stderr)
            return 1
    write_text(FILE, changed)
    print("params.yaml is written: git diff params.yaml")
    return doctor.say(Root())


def answers(options: argparse.Namespace) -> dict[str, Any]:
    """The values to write, by their dotted names."""
    model = options.model or ask("Model: tiny, a folder, or hf://org/name@revision", "tiny")
    usual = "64" if model == "tiny" else "1024"
    tokens = options.max_tokens or ask("Most tokens of a completion", usual)
    data = options.data or ask(f"Data: {EMBEDDED}, or a file of prompts and answers", EMBEDDED)
    values: dict[str, Any] = {
        "policy.source": model,
        "sampling.max_tokens": whole(tokens),
    }
    if data != EMBEDDED:
        preset = options.preset or ask("Read as", PRESETS[0], PRESETS)
        values["ingest.sources"] = [{"preset": preset, "settings": {"path": data}}]
    gpu = options.gpu or ask("Sample and train on a GPU?", "no", YES_NO)
    dtype = "bfloat16" if gpu == "yes" else "float32"
    return {
        **values,
        "engine.device": "cuda" if gpu == "yes" else "cpu",
        "engine.dtype": dtype,
        "train.dtype": dtype,
    }


def whole(answer: Any) -> int:
    try:
        return int(answer)
    except ValueError as error:
        raise ParamsError(f"{answer!r} is not a whole number") from error


def ask(question: str, usual: str, known: tuple[str, ...] = ()) -> str:
    """An answer from the terminal; the usual one where it is empty. Raises ParamsError where nobody
    is there to answer."""
    choice = f" ({', '.join(known)})" if known else ""
    while True:
        try:
            answer = input(f"{question}{choice} [{usual}]: ").strip() or usual
        except EOFError as error:
            raise ParamsError(
                f"{question} needs an answer, and the input has ended: give it as an option "
                "(winnow init --help)"
            ) from error
        if not known or answer in known:
            return answer
        print(f"{answer!r} is none of {', '.join(known)}")


def is_modified() -> bool:
    """Whether params.yaml has changes that git does not have; also where git cannot say."""
    command = ("git", "status", "--porcelain", "--", FILE.name)
    try:
        done = subprocess.run(
            command, cwd=FILE.parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return bool(done.stdout.strip())
