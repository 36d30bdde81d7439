"""Write the tables of the stage from the index and the stored texts: splits, rejections, and
contaminated pairs."""

from pathlib import Path

import polars as pl

from tasks.common.artifacts import CONTAMINATION, PROMPTS, REJECTED
from tasks.ingest.questions.duplicates import ALIVE
from tasks.ingest.spool import Spool

DETAILS = {
    "duplicate": "the same question with the same answer is in {place}",
    "conflicting_answers": "the same question has the answer {answer!r} in {place}",
    "contaminated": (
        "the question is also asked by {place}, which is in the split {split}: see "
        "contamination.parquet"
    ),
    "demonstrated": "the question is one of the demonstrations of policy.supervised",
}


def write_prompts(path: Path, spool: Spool, index: pl.DataFrame, name: str) -> int:
    """Write one split in the order of `identity.place`. Return the number of its prompts."""
    rows = index.filter(pl.col("split") == name).sort("place", "row")["row"]
    PROMPTS.write_parts(path, (part.drop("row") for part in spool.ordered(rows, *PROMPTS.columns)))
    return len(rows)


def write_rejected(path: Path, spool: Spool, index: pl.DataFrame) -> None:
    """Write every rejected row with its reason and its content, in the order of reading."""
    later = index.filter(~ALIVE & pl.col("other").is_not_null())
    others = spool.take(later["other"].unique().sort(), "source", "line", "answer")
    known = others.join(index.select("row", "split"), on="row", maintain_order="left").select(
        other="row", place=pl.format("{} line {}", "source", "line"), answer="answer", split="split"
    )
    details = (
        later.select("row", new="reason", other="other")
        .join(known, on="other", maintain_order="left")
        .select(
            "row",
            new_reason=pl.col("new").cast(pl.String),
            new_detail=pl.struct(pl.all()).map_elements(detail, pl.String),
        )
    )
    REJECTED.write_parts(
        path, (joined(chunk, details) for chunk in spool.chunks(*REJECTED.columns))
    )


def detail(row: dict[str, str]) -> str:
    """Return why a row was rejected after reading, with the source and line of the row that it
    repeats or contradicts, or of the matching row in the evaluation."""
    return DETAILS[row["new"]].format(**{**row, "answer": row["answer"][:200]})


def joined(chunk: pl.DataFrame, details: pl.DataFrame) -> pl.DataFrame:
    """Return the rejected rows of one part of the spool as a REJECTED table."""
    return (
        chunk.join(details, on="row", how="left", maintain_order="left")
        .with_columns(
            reason=pl.coalesce("reason", "new_reason"), detail=pl.coalesce("detail", "new_detail")
        )
        .filter(pl.col("reason").is_not_null())
        .select(list(REJECTED.columns))
    )


def write_contamination(path: Path, spool: Spool, index: pl.DataFrame, pairs: pl.DataFrame) -> None:
    """Write the contaminated pairs with the texts of both rows."""
    columns = ("source", "line", "question")

    def with_texts(part: pl.DataFrame) -> pl.DataFrame:
        train = spool.take(part["row"].unique().sort(), *columns)
        other = spool.take(part["other"].unique().sort(), "prompt_id", *columns).join(
            index.select("row", "split"), on="row", maintain_order="left"
        )
        joined = part.join(train, on="row", maintain_order="left").join(
            other, left_on="other", right_on="row", suffix="_other", maintain_order="left"
        )
        return joined.select(
            "kind",
            "overlap",
            "source",
            "line",
            pl.col("question").alias("prompt"),
            pl.col("split").alias("eval_split"),
            pl.col("prompt_id").alias("eval_prompt_id"),
            pl.col("source_other").alias("eval_source"),
            pl.col("line_other").alias("eval_line"),
            pl.col("question_other").alias("eval_prompt"),
        )

    CONTAMINATION.write_parts(path, map(with_texts, pairs.iter_slices(50_000)))
