"""Train, validation and test: by content, so that neither the order of the sources nor of their rows matters.

Every prompt has a place in an order set by the seed and its own content; test takes the first places, then
validation, then train. A prompt that is added later shifts few others.
"""

import hashlib
from dataclasses import dataclass
from itertools import combinations

import polars as pl

from tasks.common.artifacts import PROMPTS
from tasks.common.files import digest
from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.candidates import Row
from tasks.ingest.duplicates import normalised


@dataclass(frozen=True)
class Sizes:
    """The section `ingest.splits`, in prompts. `train: null` takes all that are left."""

    train: int | None
    validation: int
    test: int


def prompt_id(row: Row) -> str:
    """16 hex digits of what is asked and how it is judged."""
    return digest([row.prompt, row.answer, row.verifier])


def split(rows: list[Row], sizes: Sizes, seed: int, rejected: str) -> dict[str, pl.DataFrame]:
    """The three tables. StageError with the numbers when there are too few rows; `rejected` says where others went."""
    wanted = {"test": sizes.test, "validation": sizes.validation, "train": sizes.train}
    for name, size in wanted.items():
        if size is not None and size < 1:
            raise ParamsError(f"ingest.splits.{name} is {size}; a split needs at least one prompt")
    needed = sum(1 if size is None else size for size in wanted.values())
    if len(rows) < needed:
        raise StageError(
            f"the splits need {needed} prompts (train {sizes.train or 'the rest, 1 or more'}, validation "
            f"{sizes.validation}, test {sizes.test}) and the sources have {len(rows)}; rejected: {rejected}"
        )
    ordered = sorted(rows, key=lambda row: hashlib.sha256(f"{seed}/{prompt_id(row)}".encode()).hexdigest())
    ends = [sizes.test, sizes.test + sizes.validation, needed if sizes.train is not None else len(rows)]
    starts = [0, *ends]
    parts = {name: table(ordered[start:end]) for name, start, end in zip(wanted, starts, ends, strict=False)}
    check_disjoint(parts)
    return parts


def table(rows: list[Row]) -> pl.DataFrame:
    columns = ("prompt", "answer", "verifier", "source", "level")
    return PROMPTS.frame(
        {"prompt_id": prompt_id(row), **{name: getattr(row, name) for name in columns}} for row in rows
    )


def check_disjoint(parts: dict[str, pl.DataFrame]) -> None:
    """StageError when two splits share a prompt: what is tested on must never have been trained on."""
    texts = {name: {normalised(prompt): prompt for prompt in frame["prompt"]} for name, frame in parts.items()}
    for one, other in combinations(texts, 2):
        shared = texts[one].keys() & texts[other].keys()
        if shared:
            raise StageError(f"{one} and {other} share {len(shared)} prompts, such as {texts[one][min(shared)]!r:.200}")
