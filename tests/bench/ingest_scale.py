"""Ingest of a million rows: seconds, and the peak memory of the stage's process; and near
duplicates for a hundred thousand rows.

    python -m tests.bench.ingest_scale [--rows 1000000] [--near 100000]

Runs `python -m tasks.ingest` on synthetic word problems (JSON Lines in gzip, about 280 characters
per row; one in a hundred repeats another, one in a thousand has no gold), each time in a new
process, on a quarter of the rows and on all: reading, checking, grading every gold by its verifier,
exact duplicates, splits, writing. Then it runs on fewer rows against an evaluation of 5,000, with
and without the search for near duplicates; the difference is the cost of the search. The claims are
that memory grows more slowly than the rows, and seconds in proportion to them."""

import argparse
import gzip
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from tasks.common.artifacts import Layout
from tests.bench.peak import Peak, peak_of
from tests.bench.world import PROJECT
from tests.ingest.helpers import entry

NUM_WORDS = 20_000  # of a synthetic language, drawn as in a text: few often, most rarely
NUM_EVALUATION = 5_000
NEAR = {"overlap": 0.7, "ngram": 3, "same_numbers": True}


def problems(count: int) -> Iterator[dict[str, str | None]]:
    """Yield word problems of 40 words and three numbers."""
    rng = random.Random(0)
    words = [
        "".join(rng.choices("aeioubdfgklmnprst", k=rng.randint(2, 9))) for _ in range(NUM_WORDS)
    ]
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(NUM_WORDS)))
    recent: list[dict[str, str | None]] = []
    for number in range(count):
        text = rng.choices(words, cum_weights=weights, k=40)
        for place in (7, 19, 31):
            text[place] = str(rng.randint(2, 999))
        row: dict[str, str | None] = {
            "question": " ".join(text) + "?",
            "gold": str(rng.randint(0, 10**6)),
        }
        if number % 1000 == 500:
            row["gold"] = None
        if number % 100 == 99:
            row = rng.choice(recent)
        recent = [*recent[-99:], row]
        yield row


def write_source(path: Path, count: int) -> None:
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in problems(count))


def run(
    folder: Path, source: Path, contamination: dict[str, Any], num_evaluation: int = NUM_EVALUATION
) -> tuple[Peak, dict[str, float]]:
    """Run the stage once on a fresh data root, and return its usage and the rows of its tables. A
    fifth of the evaluation prompts are for validation."""
    values = yaml.safe_load((PROJECT / "params.yaml").read_text())
    validation = num_evaluation // 5
    values["ingest"] |= {
        "splits": {"train": None, "validation": validation, "test": num_evaluation - validation},
        "sources": [entry(source, name="made")],
        "contamination": contamination,
    }
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        (root / "params.yaml").write_text(yaml.safe_dump(values))
        paths = ["--params", str(root / "params.yaml"), "--data", str(root / "data")]
        return peak_of(["-m", "tasks.ingest", *paths]), rows_of(Layout(root / "data"))


def rows_of(layout: Layout) -> dict[str, float]:
    names = ("train", "rejected", "contamination")
    return {
        name: pl.scan_parquet(layout.prompts(name)).select(pl.len()).collect().item()
        for name in names
    }


def show(what: str, spent: Peak, rows: dict[str, float]) -> None:
    print(
        f"{what:>28}  {spent.seconds:7.1f} s  {spent.megabytes:6.0f} MB  "
        f"{rows['train']:8.0f} in train, {rows['rejected']:6.0f} rejected, "
        f"{rows['contamination']:4.0f} pairs",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How ingest grows with the rows")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--near", type=int, default=100_000)
    options = parser.parse_args()
    exact = {**NEAR, "overlap": None}
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), Path(name) / "rows.jsonl.gz"
        for count in filter(None, (options.rows // 100, options.rows // 4, options.rows)):
            write_source(source, count)
            evaluation = min(NUM_EVALUATION, count // 2)
            show(f"{count:,} rows", *run(folder, source, exact, evaluation))
        for count in filter(None, (options.near // 4, options.near)):
            write_source(source, count)
            evaluation = min(NUM_EVALUATION, count // 2)
            without, found = (run(folder, source, each, evaluation) for each in (exact, NEAR))
            show(f"{count:,} rows, exact", *without)
            show(f"{count:,} rows, near", *found)
            more = found[0] - without[0]
            print(f"{'the near search':>28}  {more.seconds:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
