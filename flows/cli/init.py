"""winnow init [DIR]: asks for model, data, hardware and budget, reads some rows of the data, and
writes matching parameters.

With DIR it creates your own project there: a folder with its own git, DVC and params.yaml, but no
code, because this installation runs it. Without DIR it edits the params.yaml of this folder; the
rest of the file, including comments, stays unchanged. It does not ask for values given as options.
It overwrites a file with uncommitted changes only after confirmation, or with --overwrite."""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.cli import doctor
from flows.doctor import nvidia
from flows.pipeline import commands
from flows.pipeline.roots import MAIN, Root
from tasks.common.config import derived
from tasks.common.config.editing import set_values
from tasks.common.files import write_text
from tasks.common.params import ParamsError, check_leaves, load

FILE = commands.ROOT / "params.yaml"
PRESETS = ("gsm8k", "math", "svamp", "verl", "apps", "mbpp", "humaneval", "ifeval")
"""Presets that need no setting but the path of a file, or have usual ones in `drafts`."""

EMBEDDED = "embedded"
NONE = "none"
DTYPES = {"yes": "bfloat16", "no": "float32"}  # key: whether there is a GPU
YES_NO = ("yes", "no")
LARGE = 1e9  # number of parameters
MAX_CHARACTERS = 20_000  # maximum length of a prompt
TURN_TOKENS = 64  # tokens of a chat template around a prompt
SCHEMA = "# yaml-language-server: $schema=docs/params.schema.json\n"  # a project lacks this file
OWN_FILES = (".dvc", "dvc.yaml", "params.yaml")
COPIED = (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", "data/.gitignore")
MAX_THREADS = 16  # a model that trains on a CPU gains little from more
NEW = """\
# What people set. All else has a default: `winnow params` prints every value and where it is from.
# Change a value and run again: only what depends on it re-runs.

experiment:
  recipes: [grpo, sgpo, winnow]   # `winnow recipes` lists all; own ones go under `recipes:`
  seeds: [0]                      # more seeds: a narrower interval
  budget: null   # of every cell, its profile included; null: its plan

ingest:
  splits: {}   # rows each; disjoint by content; null: all that remain
  sources:   # each: a preset and its settings
    - {}

policy:
  source: null   # a folder | x.gguf | hf://org/name@revision | s3://...

sampling:   # what a sample depends on: after a change every prompt is sampled again
  max_tokens: null   # a completion that reaches it is `truncated`

engine:
  device: null   # auto | cpu | cuda
  threads: 1   # CPU cores of a stage

allocate: {passes: 1}   # over the prompts that a recipe keeps

train:   # common to all recipes, which may change values
  batch: {}   # rollouts of an update
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="DIR", help="create a new project there")
    parser.add_argument("--model", help="tiny, a folder, or hf://org/name@revision")
    parser.add_argument("--max-tokens", type=int, help="maximum length of a completion")
    parser.add_argument("--data", help=f"{EMBEDDED}, or a file: a path, s3://, hf:// or https://")
    parser.add_argument("--preset", help=f"{', '.join(PRESETS)}, or a published set")
    parser.add_argument("--fields", nargs=2, metavar=("QUESTION", "ANSWER"), help="in the file")
    parser.add_argument("--gpu", choices=YES_NO, help="whether to use a GPU")
    parser.add_argument("--adapters", choices=YES_NO, help="whether to train only adapters")
    parser.add_argument("--budget", help=f"executed FLOPs per recipe, or {NONE}")
    parser.add_argument("--overwrite", action="store_true", help="do not ask before overwriting")


def run(options: argparse.Namespace) -> int:
    """Ask for values and write them. Return the doctor's status; 0 if unchanged, 1 if declined."""
    if options.folder is not None:
        return make_project(Path(options.folder).expanduser().absolute(), options)
    load(FILE)  # a file that cannot be read is refused before questions
    text = FILE.read_text()
    changed = set_values(text, answers(options))
    if changed == text:
        print("params.yaml already has these values")
        return 0
    if not options.overwrite and is_modified():
        what = "params.yaml has changes that are not committed. Overwrite it?"
        if ask(what, "no", YES_NO) == "no":
            print("nothing was written", file=sys.stderr)
            return 1
    write_text(FILE, changed)
    print("params.yaml is written: git diff params.yaml")
    os.chdir(commands.ROOT)  # paths in params.yaml are relative to it
    return doctor.run(argparse.Namespace(data=MAIN, price=None, look=None))


def answers(options: argparse.Namespace) -> dict[str, Any]:
    """Ask for values not given as options; set `options.data`. Return all values by dotted key."""
    from flows.doctor.machine import num_cores
    from flows.doctor.places import describe_model  # takes two seconds

    model = options.model or ask("Model: tiny, a folder, x.gguf, or hf://org/name@revision", "tiny")
    check_leaves({"model": model}, "--")
    known = describe_model({"policy": {"source": model}}, Root().layout)
    context = (known.max_length if known and model != "tiny" else None) or 2 * MAX_CHARACTERS
    usual = "64" if model == "tiny" else str(min(1024, context // 2))
    tokens = number(options.max_tokens or ask("Maximum tokens of a completion", usual), int)
    data = options.data or ask(f"Data: {EMBEDDED}, or a file of prompts and answers", EMBEDDED)
    options.data = data
    check_leaves({"data": data}, "--")
    values: dict[str, Any] = {"policy.source": place(model, options), "sampling.max_tokens": tokens}
    if data != EMBEDDED:
        longest = min(MAX_CHARACTERS, max(context - tokens - TURN_TOKENS, 1))
        values |= of_file(data, options, longest)
    there = "yes" if nvidia.gpus() else "no"
    gpu = options.gpu or ask("Sample and train on a GPU?", there, YES_NO)
    values |= {"engine.device": "cuda" if gpu == "yes" else "cpu"}
    values |= dict.fromkeys(("engine.dtype", "train.dtype"), DTYPES[gpu])
    if model != "tiny":
        adapters = options.adapters or ask("Train only adapters?", "no", YES_NO)
        values |= training(known.num_parameters if known else LARGE, adapters == "yes")
        threads = min(num_cores(), MAX_THREADS)
        values |= {"engine.threads": threads} if gpu == "no" else {}
    usual = "4e11" if model == "tiny" else NONE
    budget = options.budget or ask(f"FLOPs executed that a recipe may spend, or {NONE}", usual)
    return values | {"experiment.budget": as_budget(budget)}


def place(text: str, options: argparse.Namespace) -> str:
    """Return an existing path relative to the project, or absolute if outside; other text as is."""
    full = Path(text).expanduser().absolute()
    base = Path(options.folder or commands.ROOT).expanduser().absolute()
    if text == "tiny" or "://" in text or not full.exists():
        return text
    return str(full.relative_to(base) if full.is_relative_to(base) else full)


def of_file(data: str, options: argparse.Namespace, longest: int) -> dict[str, Any]:
    """Return the values for a file of prompts, from its first rows; `longest` is in characters."""
    drafts = importlib.import_module("tasks.ingest.drafts")
    entry, splits = drafts.draft(data, options.preset, options.fields, longest)
    entry["settings"]["path"] = place(data, options)
    values = {"ingest.sources": [entry], "ingest.splits": splits}
    return values | {"ingest.max_prompt_characters": longest}


def training(num_parameters: float, has_adapters: bool) -> dict[str, Any]:
    """Return values of the section `train` that suit a pretrained policy of this size."""
    is_large = num_parameters >= LARGE
    rate = 1e-4 if has_adapters else 1e-6 if is_large else 1e-5
    values = {"train.learning_rate": rate, "train.batch": {"size": 256 if is_large else 64}}
    return values | ({"train.lora": {"rank": 16, "alpha": 32.0}} if has_adapters else {})


def as_budget(answer: str) -> dict[str, Any] | None:
    """Parse executed FLOPs, or NONE, into `experiment.budget`. Raise ParamsError if invalid."""
    if answer == NONE:
        return None
    amount = number(answer, float)
    if not 0 < amount < float("inf"):
        raise ParamsError(f"--budget is {answer}: it must be FLOPs above 0, or {NONE}")
    return {"account": "executed", "amount": amount}


def make_project(folder: Path, options: argparse.Namespace) -> int:
    """Create a project in `folder`, keeping existing files and writing `dvc.yaml` last. Return the
    doctor's status. Raise ParamsError if git is missing or one of OWN_FILES exists."""
    if shutil.which("git") is None:
        raise ParamsError("git was not found, but a project needs a repository: install it")
    if existing := [name for name in OWN_FILES if (folder / name).exists()]:
        raise ParamsError(f"{folder} already has a {existing[0]}: use a new folder")
    values = answers(options)
    is_embedded = options.data == EMBEDDED or values["policy.source"] == "tiny"
    base = (commands.CODE / "params.yaml").read_text() if is_embedded else NEW
    texts = {name: (commands.CODE / name).read_text() for name in COPIED}
    texts["params.yaml"] = set_values(base.removeprefix(SCHEMA), values)
    texts["dvc.yaml"] = derived.own_pipeline((commands.CODE / "dvc.yaml").read_text())
    for name, text in texts.items():
        if not (folder / name).exists():
            write_text(folder / name, text)
    if not (folder / ".git").exists():
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    print(f"{folder} is now a project: work there, and commit it with git")
    return subprocess.run([sys.executable, "-m", "flows", "doctor"], cwd=folder).returncode


def number(answer: Any, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(answer)
    except ValueError as error:
        raise ParamsError(f"{answer!r} is not a {'whole ' * (kind is int)}number") from error


def ask(question: str, usual: str, known: tuple[str, ...] = ()) -> str:
    """Return the user's answer, or `usual` if it is empty. If `known` is given, ask again until the
    answer is in it. Raise ParamsError if the input has ended."""
    choice = f" ({', '.join(known)})" if known else ""
    while True:
        try:
            answer = input(f"{question}{choice} [{usual}]: ").strip() or usual
        except EOFError as error:
            raise ParamsError(
                f"{question} needs an answer, but the input has ended: set it by an option "
                "(winnow init --help)"
            ) from error
        if not known or answer in known:
            return answer
        print(f"{answer!r} is none of {', '.join(known)}")


def is_modified() -> bool:
    """Return whether params.yaml has uncommitted changes; True if git cannot report it."""
    command = ("git", "status", "--porcelain", "--", FILE.name)
    try:
        done = subprocess.run(
            command, cwd=FILE.parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return bool(done.stdout.strip())
