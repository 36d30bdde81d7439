"""From the entries of `ingest.sources` to clean rows and rejections, one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.common import registry
from tasks.common.params import ParamsError, parse
from tasks.common.progress import progress
from tasks.ingest import sources as presets
from tasks.ingest.candidates import Candidate, Limits, Rejection, Row, clean
from tasks.ingest.fetching import local_file
from tasks.ingest.formats import Unreadable, records

OPTIONAL = ("prompt_template", "verifier", "weight", "max_rows", "split")


@dataclass(frozen=True)
class Source:
    """One entry of `ingest.sources`; all but `preset` and `settings` may be left out.

    `prompt_template` holds `{prompt}` once (`Question: {prompt}\\nAnswer:`). `verifier` replaces
    the preset's. `weight` is the source's share of every split, beside the other sources' weights.
    `max_rows` caps it. `split` puts all of its rows into one split, which then takes rows from no
    source that does not name it."""

    preset: str
    settings: dict[str, Any]
    prompt_template: str | None
    verifier: str | None
    weight: float | None
    max_rows: int | None
    split: Literal["train", "validation", "test"] | None


def load(preset: str) -> Any:
    """The module of a preset; ParamsError lists those there are."""
    return registry.load(presets, preset, "ingest.sources: the preset")


def sources(entries: list[dict[str, Any]]) -> list[Source]:
    """The entries, checked."""
    if not entries:
        raise ParamsError("ingest.sources names no source")
    parsed = [
        parse(
            {**dict.fromkeys(OPTIONAL), **entry} if isinstance(entry, dict) else entry,
            Source,
            f"ingest.sources[{n}]",
        )
        for n, entry in enumerate(entries)
    ]
    for source in parsed:
        check(source)
    if len({source.weight is None for source in parsed}) > 1:
        raise ParamsError("ingest.sources: give every source a weight, or none")
    return parsed


def check(source: Source) -> None:
    """ParamsError for values out of range, or settings that the preset does not know."""
    if source.prompt_template is not None and source.prompt_template.count("{prompt}") != 1:
        raise ParamsError(
            f"ingest.sources: prompt_template {source.prompt_template!r} must hold {{prompt}} once"
        )
    if source.weight is not None and not 0 < source.weight < float("inf"):
        raise ParamsError(f"ingest.sources: weight is {source.weight}; it must be above 0")
    if source.max_rows is not None and source.max_rows < 1:
        raise ParamsError(f"ingest.sources: max_rows is {source.max_rows}; it must be at least 1")
    settings_of(source)


def settings_of(source: Source) -> Any:
    return parse(
        source.settings, load(source.preset).Settings, f"ingest.sources.{source.preset}.settings"
    )


def read(
    chosen: list[Source], max_characters: int | None, folder: Path | None
) -> Iterator[tuple[int, Row | Rejection]]:
    """Every row of every source, clean or rejected, in order, each with its source's index. Files
    that are not on this machine are fetched into `folder` first."""
    with progress(None, "ingest", "row") as bar:
        for index, source in enumerate(chosen):
            for row in rows(index, source, max_characters, folder):
                bar.update()
                yield index, row


def rows(
    index: int, source: Source, max_characters: int | None, folder: Path | None
) -> Iterator[Row | Rejection]:
    """The rows of one source. ParamsError when it has none, or when a field is missing in all of
    them."""
    limits = Limits(source.prompt_template, max_characters)
    row, num_rows, num_missing = None, 0, 0
    for found in candidates(source, folder):
        if isinstance(found, Candidate) and source.verifier is not None:
            found = replace(found, verifier=source.verifier)
        row = found if isinstance(found, Rejection) else clean(found, limits)
        num_rows += 1
        num_missing += isinstance(row, Rejection) and row.reason == "missing_field"
        yield row
    if row is None:
        raise ParamsError(f"ingest.sources[{index}] ({source.preset}) has no rows")
    if isinstance(row, Rejection) and num_missing == num_rows:
        raise ParamsError(
            f"ingest.sources[{index}] ({source.preset}): in every one of {num_rows} rows "
            f"{row.detail}. Check the names "
            f"of the fields; the last row is {row.content[:300]}"
        )


def candidates(source: Source, folder: Path | None) -> Iterator[Candidate | Rejection]:
    """What a source's module makes, or makes of the records of its file."""
    module, settings = load(source.preset), settings_of(source)
    if hasattr(module, "read"):
        yield from module.read(settings)
        return
    name = getattr(settings, "name", source.preset)
    with local_file(settings.path, folder) as path:
        for record in records(path, settings.path):
            if isinstance(record, Unreadable):
                yield Rejection(name, record.line, record.reason, record.detail, record.content)
            else:
                yield module.candidate(record, settings)
