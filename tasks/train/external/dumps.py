"""Rollouts that other trainers have dumped, read one by one: a dump may be larger than memory."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from tasks.common.files import ArtifactError

CHUNK = 1024  # rows of a Parquet file in memory
PICKLED = ("*.pt", "*.pkl", "*.pickle")


@dataclass(frozen=True)
class Rollout:
    """One completion. `where` is its file and line; `truth` is the ground truth, if dumped. A dump
    of token ids has `tokens`, of prompt and completion, and empty texts."""

    where: str
    step: int
    truth: str | None
    prompt: str
    completion: str
    score: float | None
    tokens: tuple[list[int], list[int]] | None = None


def verl(folder: Path) -> Iterator[Rollout]:
    """verl's `trainer.rollout_data_dir`: a file for each step."""
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem)):
        for where, row in lines(path):
            yield Rollout(where, row["step"], row["gts"], row["input"], row["output"], row["score"])


def trl(folder: Path) -> Iterator[Rollout]:
    """TRL's `log_completions`: a Parquet file for each logged step. The exported reward function
    adds the ground truth."""
    for path in sorted(folder.rglob("completions_*.parquet")):
        for where, row in parquet_rows(path):
            yield Rollout(
                where,
                row["step"],
                row.get("ground_truth"),
                text_of(row["prompt"]),
                text_of(row["completion"]),
                row.get("winnow"),
            )


def verifiers(folder: Path) -> Iterator[Rollout]:
    """The `traces.jsonl` of verifiers; it does not state a step."""
    for path in sorted(folder.rglob("traces.jsonl")):
        for where, row in lines(path):
            data = row["task"]["data"]
            sampled = [node["message"] for node in row["nodes"] if node["sampled"]]
            rewards = [one for one in row["rewards"].values() if one is not None]
            score = sum(one["score"] * one.get("weight", 1.0) for one in rewards)
            reply = text_of(sampled[-1:])
            truth = data.get("ground_truth")
            yield Rollout(where, 0, truth, text_of(data["prompt"]), reply, score)


def areal(folder: Path) -> Iterator[Rollout]:
    """AReaL's dumped trajectories: a folder for each version of the weights."""
    for path in sorted(folder.glob("*/*.jsonl"), key=lambda path: int(path.parent.name)):
        for where, row in lines(path):
            step, score = row["head_version"], row["reward"]
            yield Rollout(where, step, None, row["prompt"], row["completion"], score)


def open_instruct(folder: Path) -> Iterator[Rollout]:
    """The shards of open-instruct's `save_traces`: token ids. Its reward has a scale of its own
    (10 for a correct answer by default) and may include other terms, so it is no score."""
    paths = {*folder.glob("*_rollouts_*.jsonl")} - {*folder.glob("*_filtered_rollouts_*.jsonl")}
    for path in sorted(paths):
        for where, row in lines(path):
            truth = row["ground_truth"]  # a list of one for each verifier
            [truth] = truth if isinstance(truth, list) else [truth]
            tokens = (row["prompt_tokens"], row["response_tokens"])
            yield Rollout(where, row["step"], truth, "", "", None, tokens)


READERS: dict[str, Callable[[Path], Iterator[Rollout]]] = {
    reader.__name__: reader for reader in (verl, trl, verifiers, areal, open_instruct)
}


def read(source: str, folder: Path) -> Iterator[Rollout]:
    """Yield the rollouts of a dump. Raise ArtifactError for a folder without one, for pickled
    files, and for a row that is not of this trainer's format."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: name the folder of {source}'s dumps")
    is_empty, where = True, str(folder)
    try:
        for rollout in READERS[source](folder):
            is_empty, where = False, rollout.where
            yield rollout
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ArtifactError(
            f"{folder}, after {where}: a row is not of {source}'s format ({error!r})"
        ) from error
    if is_empty:
        pickled = next((path for name in PICKLED for path in folder.rglob(name)), None)
        why = f"{pickled} is pickled, which could execute code" if pickled else "there is none"
        raise ArtifactError(f"{folder}: no dump of {source} can be read; {why}")


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and content of each line of a JSON Lines file."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                cut = "" if line.endswith("\n") else " (it is cut: is the trainer still writing?)"
                raise ArtifactError(f"{where} is not JSON{cut}: remove it, or wait") from error


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and content of each row of a Parquet file."""
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(CHUNK):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except ArrowInvalid as error:
        raise ArtifactError(f"{path} cannot be read as Parquet: {error}") from error


def text_of(message: Any) -> str:
    """Return the text of a prompt or a completion: text itself, or the content of the last turn."""
    return message if isinstance(message, str) else str(message[-1]["content"])
