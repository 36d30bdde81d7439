"""Read the entries of `ingest.sources` as clean rows and rejections, one at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.common import registry
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError, parse
from tasks.common.progress import progress
from tasks.ingest import sources as presets
from tasks.ingest.candidates import Candidate, Rejection, Row, Unusable, clean, field
from tasks.ingest.files.fetching import local_file
from tasks.ingest.files.formats import Record, printable, records
from tasks.ingest.selection import (
    Between,
    between,
    conditions_of,
    placeholder,
    question_of,
    row_verifier,
    select,
    verifier_of,
)
from tasks.ingest.settings import Source

HEAD_BYTES = 8 << 20  # of a remote file, fetched to examine a few rows


def load(preset: str) -> Any:
    """Return the module of a preset. Raise a ParamsError listing the presets if it is unknown."""
    return registry.load(presets, preset, "ingest.sources: the preset")


def sources(entries: list[Source]) -> list[Source]:
    """Return the entries with `verifier` and `question` parsed. Raise ParamsError if invalid."""
    parsed = []
    for number, source in enumerate(entries):
        where = f"ingest.sources[{number}]"
        if source.verifier is not None:
            source = replace(source, verifier=verifier_of(source.verifier, f"{where}.verifier"))
        source = replace(source, question=question_of(source.question, f"{where}.question"))
        check(source, where)
        parsed.append(source)
    if len({source.weight is None for source in parsed}) > 1:
        raise ParamsError("ingest.sources: give every source a weight, or none")
    return parsed


def check(source: Source, where: str) -> None:
    """Raise ParamsError for values out of range, or settings that the preset does not have."""
    registry.check(presets, source.preset, f"{where}.preset")
    if source.prompt_template is not None and source.prompt_template.count("{prompt}") != 1:
        raise ParamsError(
            f"ingest.sources: prompt_template {source.prompt_template!r} must hold {{prompt}} once"
        )
    is_chat = source.system is not None or source.shots is not None
    if sum((is_chat, source.prompt_template is not None, source.raw)) > 1:
        raise ParamsError(
            f"{where}: give raw, or prompt_template, or system and shots: raw and prompt_template "
            "make plain text, which has no turns"
        )
    if source.weight is not None and not 0 < source.weight < float("inf"):
        raise ParamsError(f"ingest.sources: weight is {source.weight}; it must be above 0")
    if source.max_rows is not None and source.max_rows < 1:
        raise ParamsError(f"ingest.sources: max_rows is {source.max_rows}; it must be at least 1")
    conditions_of(source.where, f"{where}.where")
    settings_of(source)
    generates = hasattr(load(source.preset), "read")
    for name in ("where", "question", "verifier"):
        value = getattr(source, name)
        if generates and value and not isinstance(value, str if name == "verifier" else ()):
            raise ParamsError(
                f"{where}.{name} is for files, and the preset {source.preset} reads none: remove it"
            )


def settings_of(source: Source) -> Any:
    """Parse the entry's `settings` as its preset's dataclass. Raise ParamsError if invalid."""
    module = load(source.preset)
    where = f"ingest.sources.{source.preset}.settings"
    settings = parse(source.settings, module.Settings, where)
    return module.checked(settings, where) if hasattr(module, "checked") else settings


def read(
    entries: list[Source], max_characters: int | None, folder: Path | None
) -> Iterator[tuple[int, Row | Rejection]]:
    """Yield every row of every source in order, clean or rejected, with the source's index. Remote
    files are first fetched into `folder`."""
    with progress(None, "ingest", "row") as bar:
        for index, source in enumerate(entries):
            for row in rows(index, source, max_characters, folder):
                bar.update()
                yield index, row


def rows(
    index: int,
    source: Source,
    max_characters: int | None,
    folder: Path | None,
    limit: int | None = None,
) -> Iterator[Row | Rejection]:
    """Yield a source's rows; with a `limit`, at most that many from a remote file's first
    HEAD_BYTES. Raise ParamsError if there are none, or if all lack a field; unless `limit` was
    reached, also if all lack the texts of `question`; with no limit, also if `where` and `verifier`
    exclude all."""
    where = f"ingest.sources[{index}] ({source.preset})"
    row = None
    num_rows = 0
    reasons: Counter[str] = Counter()
    max_bytes = None if limit is None else HEAD_BYTES
    for row in islice(judged(source, max_characters, folder, max_bytes), limit):
        if isinstance(row, Row) and isinstance(source.question, Between):
            part = between(row.question, source.question)
            reasons["marked"] += part is not None
            row = replace(row, question=part or row.question)
        num_rows += 1
        reasons[row.reason if isinstance(row, Rejection) else ""] += 1
        yield row
    if row is None:
        raise ParamsError(f"{where} has no rows: check its settings")
    if isinstance(row, Rejection) and reasons["missing_field"] == num_rows:
        raise ParamsError(
            f"{where}: in every one of {num_rows} rows {row.detail}. Check the names of the "
            f"fields; the last row is {row.content[:300]}"
        )
    if num_rows == limit:
        return
    if isinstance(source.question, Between) and reasons[""] and not reasons["marked"]:
        raise ParamsError(
            f"{where}: none of {reasons['']} prompts has the texts {source.question.between} of "
            "`question`: copy them from a prompt"
        )
    unused = reasons["filtered"] + reasons["no_verifier"]
    if isinstance(row, Rejection) and limit is None and unused == num_rows:
        raise ParamsError(
            f"{where}: none of {num_rows} rows is used: {row.detail}. Check the columns and "
            f"values; the last row is {row.content[:300]}"
        )


def judged(
    source: Source, max_characters: int | None, folder: Path | None, max_bytes: int | None
) -> Iterator[Row | Rejection]:
    """Yield the records of a source as rows or rejections."""
    module, settings = load(source.preset), settings_of(source)
    name = getattr(settings, "name", source.preset)
    conditions = conditions_of(source.where, "where")

    def row_of(record: Record) -> Row | Rejection:
        candidate = Candidate(None, None, "", source=name)
        try:
            select(record.fields, conditions)
            candidate = module.candidate(record, settings)
            candidate = replace(
                candidate, source=name if candidate.source is None else candidate.source
            )
            return clean(completed(candidate, record, source), record, source, max_characters)
        except Unusable as error:
            place = printable(error.source or candidate.source)
            return Rejection(record.line, record.content, error.reason, str(error), place)
        except (TypeError, ValueError, RecursionError) as error:
            detail = printable(f"it cannot be read: {type(error).__name__}: {error}"[:300])
            return Rejection(record.line, record.content, "malformed", detail, candidate.source)

    for record in records_of(module, settings, folder, max_bytes):
        yield row_of(record) if isinstance(record, Record) else replace(record, source=name)


def records_of(
    module: Any, settings: Any, folder: Path | None, max_bytes: int | None
) -> Iterator[Record | Rejection]:
    """Yield the records that a source's module generates, or the records of its file. If only
    `max_bytes` were fetched, the file may be unreadable (Parquet is read from its end, JSON as a
    whole); then yield one rejection."""
    if hasattr(module, "read"):
        yield from module.read(settings)
        return
    with local_file(settings.path, folder, max_bytes) as path:
        try:
            yield from records(path, settings.path)
        except ArtifactError:
            if max_bytes is None or path.stat().st_size < max_bytes:
                raise
            yield Rejection(1, "", "too_large", "only the beginning of the file was fetched")


def completed(candidate: Candidate, record: Record, source: Source) -> Candidate:
    """Return a candidate with the verifier and the question that the entry sets, if any. Raise
    Unusable if that leaves no verifier, or for an image placeholder in the prompt."""
    if source.verifier is not None:
        candidate = replace(candidate, verifier=row_verifier(source.verifier, record.fields))
    if name := placeholder(candidate.prompt):
        detail = f"the prompt has the image placeholder {name}, and images are not read"
        raise Unusable(detail, "needs_image")
    if isinstance(source.question, str):
        candidate = replace(candidate, question=field(record.fields, source.question))
    return candidate
