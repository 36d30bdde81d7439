"""Trainers that a plan can be exported to: one file each, which declares a TARGET."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SHARED = ("files",)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """The data format of one trainer.

    `row` maps a visit (a row of `visits.Visits.table`, with `truth`: the answer, or its id and
    verifier as JSON) to a row of the trainer's file. `settings` are the lines that a user must set,
    with values in braces that `export` fills in. `sizes`: whether a group's size is of each prompt
    or of a whole file. `is_chat`: the trainer always applies the chat template, so that plain text
    cannot be carried."""

    version: str  # whose source was read, or the date of its documentation
    format: Literal["parquet", "jsonl", "dataset"]
    row: Callable[[Row], dict[str, Any]]
    settings: str
    sizes: Literal["prompt", "file"] = "file"
    keeps_order: bool = True
    is_chat: bool = True
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ("reward.py",)  # each is `files/NAME.txt` here
    is_loadable: bool = False  # `files/loaders.py.txt` runs its loader


def turns_or_text(visit: Row) -> Any:
    """Return a visit's turns, or its text if it is plain."""
    return visit["prompt"] if visit["messages"] is None else visit["messages"]
