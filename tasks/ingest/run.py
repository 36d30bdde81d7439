"""The stage `ingest`: read sources and write prompts with answers, in three splits."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl
from tabulate import tabulate

from tasks.common.files import digest_file, temporary_folder
from tasks.common.stage import Stage
from tasks.grading.grader import Grader
from tasks.grading.settings import Verify
from tasks.ingest import golds, splits, writing
from tasks.ingest.candidates import Row
from tasks.ingest.demonstrations import coinciding, demonstrations
from tasks.ingest.questions import contamination, duplicates
from tasks.ingest.questions.shared_text import SharedText, SharedTexts
from tasks.ingest.reading import load, read, sources
from tasks.ingest.settings import NAMES, Ingest, Source
from tasks.ingest.spool import Spool
from tasks.policy.settings import Policy

logger = logging.getLogger("tasks.ingest")


@dataclass(frozen=True)
class Sections:
    """The sections of params.yaml that the stage reads."""

    ingest: Ingest
    verify: Verify
    policy: Policy


def main(stage: Stage) -> None:
    """Read, check and split all rows, and write the tables; with --dry-run only print counts."""
    sections = stage.sections(Sections)
    settings = sections.ingest
    entries = sources(settings.sources)
    folder = None if stage.options.dry_run else stage.layout.root
    with temporary_folder(folder, "ingest") as temporary:
        supervised = sections.policy.supervised
        taught = demonstrations(supervised) if supervised else []
        spool, index, pairs = ingest(settings, entries, sections.verify, temporary, taught)
        if stage.options.dry_run:
            print(table(index))
            return
        logger.info("rows read, by source and outcome:\n%s", table(index))
        write(stage, spool, index, pairs)


def ingest(
    settings: Ingest,
    entries: list[Source],
    verify: Verify,
    folder: Path,
    taught: Sequence[Row] = (),
) -> tuple[Spool, pl.DataFrame, pl.DataFrame]:
    """Return all rows read (with texts in `folder`), the index with the outcome of each row, and
    the contaminated pairs. Rows with a question of the demonstrations `taught` are rejected."""
    spool = Spool(folder, settings.seed)
    samples = SharedTexts(n for n, source in enumerate(entries) if may_share_text(source))
    # by source: the number of rows with special tokens of chats, and where the first one is
    marked: dict[str, tuple[int, str]] = {}
    with Grader(verify) as grader:
        rows = read(entries, settings.max_prompt_characters, folder)
        for entry, row in golds.check(rows, grader):
            spool.add(entry, row)
            samples.add(entry, row)
            if isinstance(row, Row) and row.marker:
                first = f"{row.marker!r} in {row.source}, line {row.line}"
                number, first = marked.get(row.source, (0, first))
                marked[row.source] = number + 1, first
        for source, (number, first) in marked.items():
            logger.info(
                "%s: the text of %d prompts has what chats use as special tokens, such as %s; it "
                "is sampled as text",
                source,
                number,
                first,
            )
        compare_without_shared_text(spool, samples.shared())
        index = spool.close().index
        for key in ("text", "folded"):
            texts = spool.take(duplicates.differing(index, key)["row"], "answer", "verifier")
            index = duplicates.unify(index, texts, key, lambda pairs: golds.equal(pairs, grader))
    index = duplicates.resolve(index, [source.split for source in entries])
    index = duplicates.reject(index, coinciding(taught, spool, index, entries))
    pairs = [pl.DataFrame(schema=contamination.PAIRS)]

    def contaminated(train: pl.DataFrame, evaluation: pl.DataFrame) -> pl.DataFrame:
        pairs.append(contamination.pairs(spool, train, evaluation, settings.contamination))
        first = pairs[-1].unique("row", keep="first", maintain_order=True)
        return first.select("row", "other", reason=pl.lit("contaminated"))

    index = splits.split(index, settings.splits, entries, contaminated)
    return spool, index, pl.concat(pairs)


def may_share_text(source: Source) -> bool:
    """Return whether the prompts of a source may share an instruction that is not part of the
    question: true for a source that reads files, unless its setting `question` is given."""
    return source.question is None and not hasattr(load(source.preset), "read")


def compare_without_shared_text(spool: Spool, texts: dict[tuple[int, str], SharedText]) -> None:
    """In the texts that are compared, drop the text that the prompts of a source share."""
    for (entry, source), shared in texts.items():
        logger.info(
            "ingest.sources[%d] (%s): questions are compared without what its prompts share: %r "
            "before, %r after",
            entry,
            source,
            shared.start,
            shared.end,
        )

    def question(entry: int, source: str, text: str) -> str:
        shared = texts.get((entry, source))
        return shared.stripped(text) if shared else text

    if texts:
        spool.compare_by(question)


def write(stage: Stage, spool: Spool, index: pl.DataFrame, pairs: pl.DataFrame) -> None:
    """Write all tables, and record the parameters and the splits with the tracker."""
    writing.write_rejected(stage.layout.prompts("rejected"), spool, index)
    writing.write_contamination(stage.layout.prompts("contamination"), spool, index, pairs)
    stage.tracker.params({"ingest": asdict(stage.section("ingest", Ingest))})
    for name in NAMES:
        path = stage.layout.prompts(name)
        num_prompts = writing.write_prompts(path, spool, index, name)
        stage.tracker.dataset(name, path, digest_file(path), "ingest")
        logger.info("%s: %d prompts", name, num_prompts)
        if not num_prompts:
            logger.warning("no stage that measures on %s can run without prompts in it", name)


def table(index: pl.DataFrame) -> str:
    """Return a text table with a line per source and a total: the numbers of rows read, in each
    split, and rejected for each reason. `unused` counts good rows that no split needed."""
    fate = pl.coalesce(pl.col("reason").cast(pl.String), "split", pl.lit("unused"))
    counts = index.group_by(pl.col("source").cast(pl.String), fate=fate).len()
    reasons = index["reason"].cast(pl.String).drop_nulls().value_counts(sort=True)["reason"]
    names = ["read", *NAMES, "unused", *reasons]
    numbers = {(source, what): number for source, what, number in counts.iter_rows()}
    rows = [["source", *names]]
    for source in index["source"].cast(pl.String).unique(maintain_order=True):
        cells = {name: numbers.get((source, name), 0) for name in names}
        cells["read"] = sum(cells.values())
        rows.append([source, *map(str, cells.values())])
    totals = [str(sum(int(row[column]) for row in rows[1:])) for column in range(1, len(names) + 1)]
    rows.append(["all", *totals])
    sides = ["left", *["right"] * len(names)]
    return str(tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=sides))
