"""Read prompts from their sources: `python -m tasks.ingest --params params.yaml --data data`."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from tasks.common.artifacts import PROMPTS, REJECTED
from tasks.common.files import digest_file
from tasks.common.stage import Stage, run
from tasks.ingest.candidates import Rejection, Row
from tasks.ingest.duplicates import resolve
from tasks.ingest.reading import read, sources
from tasks.ingest.splits import Sizes, split

logger = logging.getLogger("tasks.ingest")


@dataclass(frozen=True)
class Ingest:
    """The section `ingest`."""

    seed: int
    splits: Sizes
    sources: list[dict[str, Any]]


def main(stage: Stage) -> None:
    settings = stage.section("ingest", Ingest)
    found = list(read(sources(settings.sources)))
    kept, doubles = resolve([row for row in found if isinstance(row, Row)])
    rejected = [row for row in found if isinstance(row, Rejection)] + doubles
    counts = ", ".join(f"{n} {reason}" for reason, n in Counter(row.reason for row in rejected).most_common()) or "none"
    logger.info("%d rows read, %d prompts kept, rejected: %s", len(found), len(kept), counts)
    parts = split(kept, settings.splits, settings.seed, counts)
    REJECTED.write(stage.layout.prompts("rejected"), REJECTED.frame(map(asdict, rejected)))
    stage.tracker.params({"ingest": stage.params["ingest"]})
    for name, frame in parts.items():
        write(stage, name, frame)


def write(stage: Stage, name: str, frame: pl.DataFrame) -> None:
    """One split, and its record."""
    path = stage.layout.prompts(name)
    PROMPTS.write(path, frame)
    stage.tracker.dataset(name, path, digest_file(path), "ingest")
    logger.info("%s: %d prompts", name, frame.height)


if __name__ == "__main__":
    run("ingest", main)
