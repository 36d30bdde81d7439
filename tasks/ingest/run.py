"""The stage `ingest`: from the sources to prompts with answers, in three splits."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from tasks.common.files import digest_file, temporary_folder
from tasks.common.stage import Stage
from tasks.grading.grader import Grader
from tasks.grading.settings import Verify
from tasks.ingest import contamination, duplicates, golds, splits, writing
from tasks.ingest.reading import load, num_rows, read, sources
from tasks.ingest.settings import Ingest, Source
from tasks.ingest.splits import Share
from tasks.ingest.spool import Spool
from tasks.ingest.summary import table
from tasks.ingest.wrappers import Wrapper, Wrappers

logger = logging.getLogger("tasks.ingest")


@dataclass(frozen=True)
class Sections:
    """The sections that the stage reads."""

    ingest: Ingest
    verify: Verify


def main(stage: Stage) -> None:
    """Read, judge and split all rows, and write the tables; with --dry-run print the counts."""
    sections = stage.sections(Sections)
    settings = sections.ingest
    chosen = sources(settings.sources)
    splits.check(settings.splits, shares(chosen))
    folder = None if stage.options.dry_run else stage.layout.root
    with temporary_folder(folder, "ingest") as temporary:
        report = golds.Report()
        spool, index, pairs = ingest(settings, chosen, sections.verify, temporary, report)
        counts = "\n".join([table(index), *report.lines()])
        if stage.options.dry_run:
            print(counts)
            return
        logger.info("rows read, by source and outcome:\n%s", counts)
        write(stage, spool, index, pairs)


def ingest(
    settings: Ingest, chosen: list[Source], verify: Verify, folder: Path, report: golds.Report
) -> tuple[Spool, pl.DataFrame, pl.DataFrame]:
    """Return all rows read (their texts in `folder`), the index with the outcome of each row, and
    the contaminated pairs. What is known of the golds is added to `report`."""
    # read every row, and check every gold with its verifier
    spool = Spool(folder, settings.seed)
    wrappers = Wrappers(n for n, source in enumerate(chosen) if may_be_wrapped(source))
    with Grader(verify) as grader:
        for entry, found in golds.check(
            read(chosen, settings.max_prompt_characters, folder), grader, report
        ):
            spool.add(entry, found)
            wrappers.add(entry, found)
        # compare questions without what all prompts of their source share
        unwrap(spool, wrappers.found())
        index = spool.close().index
        # golds of the same question that differ only in spelling are one
        texts = spool.take(duplicates.differing(index)["row"], "answer", "verifier")
        index = duplicates.unify(index, texts, lambda pairs: golds.equal(pairs, grader))
    index = duplicates.resolve(index, [source.split for source in chosen])
    # split the rest; a training row that the evaluation contains as well is rejected
    pairs = [pl.DataFrame(schema=contamination.PAIRS)]

    def contaminated(train: pl.DataFrame, evaluation: pl.DataFrame) -> pl.DataFrame:
        pairs.append(contamination.pairs(spool, train, evaluation, settings.contamination))
        first = pairs[-1].unique("row", keep="first", maintain_order=True)
        return first.select("row", "other", reason=pl.lit("contaminated"))

    index = splits.split(index, settings.splits, shares(chosen), contaminated)
    return spool, index, pl.concat(pairs)


def shares(chosen: list[Source]) -> list[Share]:
    """Return what the entries say of where their rows go."""
    return [Share(one.split, one.weight, one.max_rows, num_rows(one)) for one in chosen]


def may_be_wrapped(source: Source) -> bool:
    """Whether the prompts of a source may share an instruction that is no part of the question:
    those of a file, unless the entry says what the question is."""
    return source.question is None and not hasattr(load(source.preset), "read")


def unwrap(spool: Spool, wrappers: dict[tuple[int, str], Wrapper]) -> None:
    """Compare the rows of wrapped sources without their wrappers."""
    for (entry, source), wrapper in wrappers.items():
        logger.info(
            "ingest.sources[%d] (%s): questions are compared without what its prompts share: %r "
            "before, %r after",
            entry,
            source,
            wrapper.start,
            wrapper.end,
        )

    def question(entry: int, source: str, asked: str) -> str:
        wrapper = wrappers.get((entry, source))
        return wrapper.stripped(asked) if wrapper else asked

    if wrappers:
        spool.compare_by(question)


def write(stage: Stage, spool: Spool, index: pl.DataFrame, pairs: pl.DataFrame) -> None:
    """Write the tables and record them."""
    writing.write_rejected(stage.layout.prompts("rejected"), spool, index)
    writing.write_contamination(stage.layout.prompts("contamination"), spool, index, pairs)
    stage.tracker.params({"ingest": asdict(stage.section("ingest", Ingest))})
    for name in splits.NAMES:
        path = stage.layout.prompts(name)
        num_prompts = writing.write_prompts(path, spool, index, name)
        stage.tracker.dataset(name, path, digest_file(path), "ingest")
        logger.info("%s: %d prompts", name, num_prompts)
        if not num_prompts:
            logger.warning("no stage that measures on %s can run without prompts in it", name)
