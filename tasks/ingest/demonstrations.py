"""Demonstrations: questions with a worked solution, on which the initial policy is trained before
anything is profiled (`policy.supervised`). They come from sources of their own, in the form of
`ingest.sources`, and must be disjoint from all prompts."""

import random
from collections.abc import Sequence

import polars as pl

from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.candidates import Row
from tasks.ingest.questions.duplicates import ALIVE
from tasks.ingest.questions.identity import question_keys
from tasks.ingest.reading import read, sources
from tasks.ingest.settings import Source
from tasks.ingest.spool import Spool
from tasks.policy.settings import Supervised


def demonstrations(settings: Supervised) -> list[Row]:
    """Return the rows with a solution, in a random order by the seed, at most `max_examples`. Raise
    ParamsError if the sources are invalid, or if no row has a solution."""
    try:
        found = [row for _, row in read(sources(settings.sources), None, None)]
    except ParamsError as error:
        own = (each.replace("ingest.", "policy.supervised.") for each in error.problems)
        raise ParamsError(*own) from error
    rows = [row for row in found if isinstance(row, Row) and row.solution]
    if not rows:
        raise ParamsError(
            f"policy.supervised.sources: none of {len(found)} rows has a worked solution: use a "
            "source that has them (gsm8k, math, gsm_symbolic), or name their field as `solution` "
            "(mapping)"
        )
    random.Random(settings.seed).shuffle(rows)
    return rows[: settings.max_examples]


def coinciding(
    rows: Sequence[Row], spool: Spool, index: pl.DataFrame, entries: Sequence[Source]
) -> pl.DataFrame:
    """Return the rows of the index whose question is also a demonstration's, in the form that
    `reject` accepts. Raise StageError if a source that is only for validation or test has one."""
    keys = pl.DataFrame(
        {"folded": [question_keys(row.question)["folded"] for row in rows]}, {"folded": pl.UInt64}
    )
    found = index.filter(ALIVE).join(keys, on="folded", how="semi", maintain_order="left")
    measured = [n for n, entry in enumerate(entries) if entry.split in ("validation", "test")]
    if refused := found.filter(pl.col("entry").is_in(measured))["row"].to_list():
        place = spool.take(pl.Series([refused[0]], dtype=pl.UInt32), "source", "line", "question")
        _, source, line, question = place.row(0)
        raise StageError(
            f"{len(refused)} questions for validation and test are also demonstrations of "
            f"policy.supervised, the first in {source}, line {line} ({question[:80]!r}): remove "
            "them from one of the sources"
        )
    return found.select("row", other="row", reason=pl.lit("demonstrated"))
