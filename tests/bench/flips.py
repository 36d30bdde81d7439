"""Flip one bit of a file that some stage reads again, run that stage, and see what comes of it.

    python -m tests.bench.flips --flips 1000 --seed 0

A small world is made by the real stages, with a training that was killed, so that its checkpoints
are there. Every trial works on a copy. Its outcome is one of

- refused: an error that names the file and what to do about it;
- repaired: the result is as without the damage, and a warning names the file;
- said: a warning names the file, and the result differs only in what it says (costs of lost work,
  notes for people);
- harmless: the result is as without the damage (white space, a key that nothing reads);
- SILENT: another result without a word;
- CRASHED: an error that does not name the file, or not what to do.

The last two must not be. Of every `--follow`-th refusal of an output the remedy is followed as it
is printed: the file is deleted, the stage named is run again, and the reader has to give the same
result."""

import argparse
import io
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common import seal
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.common.remedy import maker
from tasks.common.stage import StageError
from tests.bench import flips_world
from tests.bench.flips_world import READERS, Reader

HANDLED = (ArtifactError, ParamsError, StageError)  # a stage ends with these as messages
MEASURED = ("profile", "train@")  # stages that write how long they took
REMEDY = re.compile(r"[Dd]elete|[Rr]un .*again|leave --resume out|put it back|restore")


@dataclass(frozen=True)
class Trial:
    """One flip: the file and its kind, the bit, the reader, what came of it, and the message."""

    kind: str
    file: str
    bit: int
    reader: str
    outcome: str
    said: str


class Warnings(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def read(reader: Reader, root: Path) -> tuple[Any, Exception | None, list[str]]:
    """What a reader finds in a world, or its error; and what it warned of."""
    seal.verify_state.cache_clear()  # the copies of a world may have the same inodes
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    quiet = io.StringIO()  # what stages print, and their bars
    try:
        with redirect_stdout(quiet), redirect_stderr(quiet):
            return reader.read(Layout(root)), None, warnings.lines
    except Exception as error:
        return None, error, warnings.lines
    finally:
        logging.getLogger().removeHandler(warnings)


def flip(path: Path, bit: int) -> None:
    """Change one bit in place; time and size stay."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def trial(
    world: Path, work: Path, kind: str, name: str, bit: int, reader: Reader, expected: Any
) -> Trial:
    """Flip one bit in a copy of the world at `work`, and read."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(world, work, symlinks=True)
    flip(work / name, bit)
    found, error, lines = read(reader, work)
    said = str(error) if error else "\n".join(lines)
    names = {Path(name).name, *(parent.name for parent in Path(name).parents)} - {""}
    is_named = any(part in said for part in names)
    if error is not None:
        is_good = isinstance(error, HANDLED) and is_named and REMEDY.search(said)
        outcome = "refused" if is_good else "CRASHED"
        said = said if is_good else f"{type(error).__name__}: {said}"
    elif found == expected:
        outcome = "repaired" if lines and is_named else "harmless"
    else:
        is_only_words = reader.words(found) != reader.words(expected)
        rest = reader.rest(found) == reader.rest(expected)
        outcome = "said" if lines and is_named and is_only_words and rest else "SILENT"
    return Trial(kind, name, bit, reader.name, outcome, said)


def follow(work: Path, name: str, reader: Reader, expected: Any) -> str:
    """Do what a refusal said, in the world where it was said: how that went."""
    path = work / name
    found = maker(path)
    assert found is not None
    if path.parent.name == "policy":
        path = path.parent  # a policy is one output
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    seal.verify_state.cache_clear()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        flips_world.run_stage_named(found[1], Layout(work))
    again, error, _ = read(reader, work)
    is_measured = found[1].startswith(MEASURED)  # seconds are others again
    if error is None and (is_measured or reader.rest(again) == reader.rest(expected)):
        return "worked"
    return f"FAILED ({error or 'another result'})"


def run(
    flips: int,
    seed: int,
    every: int,
    world: Path,
    work: Path,
    readers: Collection[str] = tuple(READERS),
) -> list[Trial]:
    """Make the trials, files chosen by kind first, so that small kinds are not drowned."""
    chance = random.Random(seed)
    expected: dict[str, Any] = {}
    trials: list[Trial] = []
    refused = 0
    files = flips_world.files(world, readers)
    for _ in range(flips):
        kind = chance.choice(sorted(files))
        name = chance.choice(files[kind])
        reader = READERS[
            chance.choice([one for one in flips_world.KINDS[kind].readers if one in readers])
        ]
        bit = chance.randrange(8 * (world / name).stat().st_size)
        if reader.name not in expected:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(world, work, symlinks=True)
            expected[reader.name], error, _ = read(reader, work)
            if error is not None:
                raise error
        done = trial(world, work, kind, name, bit, reader, expected[reader.name])
        trials.append(done)
        if done.outcome in ("SILENT", "CRASHED"):
            print(f"{done.outcome}: {name} bit {bit}, read by {reader.name}: {done.said}")
        if done.outcome == "refused" and every and maker(work / name):
            refused += 1
            if refused % every == 0:
                how = follow(work, name, reader, expected[reader.name])
                trials.append(Trial(kind, name, bit, reader.name, f"remedy {how[:6]}", how))
                if not how.startswith("worked"):
                    print(f"{how}: {name} bit {bit}, read by {reader.name}: {done.said}")
    return trials


def defects(trials: list[Trial]) -> list[Trial]:
    """The trials whose outcome must not be."""
    return [one for one in trials if one.outcome in ("SILENT", "CRASHED", "remedy FAILED")]


def table(trials: list[Trial]) -> str:
    """A row a kind of file, a column an outcome."""
    outcomes = list(dict.fromkeys(sorted(one.outcome for one in trials)))
    rows: dict[str, Counter[str]] = {}
    for one in trials:
        rows.setdefault(one.kind, Counter())[one.outcome] += 1
        rows.setdefault("all", Counter())[one.outcome] += 1
    lines = ["".join([f"{'file':28}", *(f"{outcome:>14}" for outcome in outcomes)])]
    for kind in sorted(rows, key=lambda kind: (kind == "all", kind)):
        counts = "".join(f"{rows[kind][outcome] or '-':>14}" for outcome in outcomes)
        lines.append(f"{kind:28}{counts}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--follow", type=int, default=10, help="try every so many-th remedy; 0: no")
    parser.add_argument("--world", type=Path, help="a world made before; else one is made")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger().addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory() as folder:
        world = options.world or Path(folder) / "world"
        if not world.exists():
            flips_world.make(world)
        started = time.perf_counter()
        trials = run(options.flips, options.seed, options.follow, world, Path(folder) / "copy")
        print(f"{table(trials)}\n{time.perf_counter() - started:.0f} s")
    return int(bool(defects(trials)))


if __name__ == "__main__":
    sys.exit(main())
