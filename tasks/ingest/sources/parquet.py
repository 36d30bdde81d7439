"""Parquet: one row a prompt, its columns named in the settings (fields of struct columns with dots)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from tasks.common.locations import open_file
from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.candidates import Candidate, Rejection, field


@dataclass(frozen=True)
class Settings:
    """`name` is the `source` of the rows; `prompt`, `answer` and `level` (or null) are names of columns."""

    path: str
    name: str
    prompt: str
    answer: str
    level: str | None
    verifier: str


def read(settings: Settings) -> Iterator[Candidate | Rejection]:
    """Every row as a candidate. StageError when the file is missing or damaged, ParamsError for an unknown column."""
    paths = [settings.prompt, settings.answer, *([settings.level] if settings.level else [])]
    frame = load(settings, sorted({path.partition(".")[0] for path in paths}))
    for line, record in enumerate(frame.iter_rows(named=True), 1):
        content = json.dumps(record, ensure_ascii=False, default=str)
        prompt, answer, *level = [field(record, path) for path in paths]
        yield Candidate(settings.name, line, content, prompt, answer, settings.verifier, level[0] if level else None)


def load(settings: Settings, columns: list[str]) -> pl.DataFrame:
    """The named columns of the file."""
    with open_file(settings.path) as file:
        content = file.read()
    try:
        known = pl.read_parquet_schema(content)
        unknown = [column for column in columns if column not in known]
        if unknown:
            raise ParamsError(f"{settings.path} has no column '{unknown[0]}'; it has: {', '.join(known)}")
        return pl.read_parquet(content, columns=columns)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise StageError(f"source {settings.name}: {settings.path} is not Parquet: {error}") from error
