"""Read the entries of `ingest.sources` as clean rows and rejections, one at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.common import registry
from tasks.common.params import ParamsError, parse
from tasks.common.progress import progress
from tasks.ingest import sources as presets
from tasks.ingest.candidates import Candidate, Limits, Rejection, Row, clean, field
from tasks.ingest.fetching import local_file
from tasks.ingest.formats import Record, Unreadable, records
from tasks.ingest.selection import (
    Between,
    between,
    chosen_verifier,
    conditions_of,
    excluded,
    no_verifier,
    placeholder,
    question_of,
    verifier_of,
)
from tasks.ingest.settings import Source


def load(preset: str) -> Any:
    """Return the module of a preset. Raises ParamsError listing the presets if there is none."""
    return registry.load(presets, preset, "ingest.sources: the preset")


def sources(entries: list[Source]) -> list[Source]:
    """Return the entries after checking them."""
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
    """Return the entry's `settings` as the preset's dataclass."""
    module = load(source.preset)
    where = f"ingest.sources.{source.preset}.settings"
    settings = parse(source.settings, module.Settings, where)
    return module.checked(settings, where) if hasattr(module, "checked") else settings


def num_rows(source: Source) -> int | None:
    """Return how many rows a source generates; None for files, which say it only when read."""
    number = getattr(settings_of(source), "num_prompts", None)
    return number if isinstance(number, int) else None


def read(
    chosen: list[Source], max_characters: int | None, folder: Path | None
) -> Iterator[tuple[int, Row | Rejection]]:
    """Yield every row of every source in order, clean or rejected, with the source's index. Files
    that are not on this machine are fetched into `folder` first."""
    with progress(None, "ingest", "row") as bar:
        for index, source in enumerate(chosen):
            for row in rows(index, source, max_characters, folder):
                bar.update()
                yield index, row


def rows(
    index: int, source: Source, max_characters: int | None, folder: Path | None
) -> Iterator[Row | Rejection]:
    """Yield the rows of one source. Raises ParamsError if it has none, or if all of them lack a
    field, or are not those that it asks for."""
    limits = Limits(source.prompt_template, max_characters)
    where = f"ingest.sources[{index}] ({source.preset})"
    row = None
    num_rows = 0
    reasons: Counter[str] = Counter()
    for found in candidates(source, folder):
        row = found if isinstance(found, Rejection) else clean(found, limits)
        if isinstance(row, Row) and isinstance(source.question, Between):
            part = between(row.asked, source.question)
            reasons["marked"] += part is not None
            row = replace(row, asked=part or row.asked)
        num_rows += 1
        reasons[row.reason if isinstance(row, Rejection) else ""] += 1
        yield row
    if row is None:
        raise ParamsError(f"{where} has no rows: check its settings")
    if isinstance(source.question, Between) and reasons[""] and not reasons["marked"]:
        raise ParamsError(
            f"{where}: none of {reasons['']} prompts has the texts {source.question.between} of "
            "`question`: copy them from a prompt"
        )
    if isinstance(row, Rejection) and reasons["missing_field"] == num_rows:
        raise ParamsError(
            f"{where}: in every one of {num_rows} rows {row.detail}. Check the names of the "
            f"fields; the last row is {row.content[:300]}"
        )
    if isinstance(row, Rejection) and reasons["filtered"] + reasons["no_verifier"] == num_rows:
        raise ParamsError(
            f"{where}: none of {num_rows} rows is used: {row.detail}. Check the columns and "
            f"values; the last row is {row.content[:300]}"
        )


def candidates(source: Source, folder: Path | None) -> Iterator[Candidate | Rejection]:
    """Yield the candidates of a source: those its module generates, or those it makes of a file's
    records."""
    module = load(source.preset)
    settings = settings_of(source)
    if hasattr(module, "read"):
        for found in module.read(settings):
            named = isinstance(found, Candidate) and source.verifier is not None
            yield replace(found, verifier=source.verifier) if named else found
        return
    name = getattr(settings, "name", source.preset)
    conditions = conditions_of(source.where, "where")
    with local_file(settings.path, folder) as path:
        for record in records(path, settings.path):
            if isinstance(record, Unreadable):
                yield Rejection(name, record.line, record.reason, record.detail, record.content)
            elif reason := excluded(record.fields, conditions):
                yield Rejection(name, record.line, *reason, record.content)
            else:
                yield as_asked(module.candidate(record, settings), record, source)


def as_asked(found: Candidate | Rejection, record: Record, source: Source) -> Candidate | Rejection:
    """Return a candidate with the verifier and the question that the entry asks for."""
    if isinstance(found, Candidate) and source.verifier is not None:
        verifier = chosen_verifier(source.verifier, record.fields)
        if verifier is None:
            detail = no_verifier(source.verifier, record.fields)
            return Rejection(found.source, record.line, "no_verifier", detail, record.content)
        found = replace(found, verifier=verifier)
    if isinstance(found, Candidate) and (name := placeholder(found.prompt)):
        detail = f"the prompt has the place of an image, {name}, and images are not read"
        return Rejection(found.source, record.line, "needs_image", detail, record.content)
    if isinstance(found, Candidate) and isinstance(source.question, str):
        found = replace(found, question=field(record.fields, source.question))
    return found
