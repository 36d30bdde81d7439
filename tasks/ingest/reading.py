"""Read the entries of `ingest.sources` as clean rows and rejections, one at a time."""

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

# keys of an entry that may be left out
OPTIONAL = ("prompt_template", "verifier", "weight", "max_rows", "split")


@dataclass(frozen=True)
class Source:
    """One entry of `ingest.sources`; all keys except `preset` and `settings` may be left out.

    `prompt_template` contains `{prompt}` once (`Question: {prompt}\\nAnswer:`). `verifier` replaces
    the preset's. `weight` is the source's share of every split, relative to the other weights.
    `max_rows` limits its rows. `split` puts all of its rows into one split, which then takes rows
    only from sources that name it."""

    preset: str
    settings: dict[str, Any]
    prompt_template: str | None
    verifier: str | None
    weight: float | None
    max_rows: int | None
    split: Literal["train", "validation", "test"] | None


def load(preset: str) -> Any:
    """Return the module of a preset. Raises ParamsError listing the presets if there is none."""
    return registry.load(presets, preset, "ingest.sources: the preset")


def sources(entries: list[dict[str, Any]]) -> list[Source]:
    """Return the entries after checking them."""
    if not entries:
        raise ParamsError("ingest.sources is empty: name at least one source")
    parsed = []
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            entry = {**dict.fromkeys(OPTIONAL), **entry}
        parsed.append(parse(entry, Source, f"ingest.sources[{number}]"))
    for source in parsed:
        check(source)
    if len({source.weight is None for source in parsed}) > 1:
        raise ParamsError("ingest.sources: give every source a weight, or none")
    return parsed


def check(source: Source) -> None:
    """Raise ParamsError for values out of range, or settings that the preset does not have."""
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
    """Return the entry's `settings` as the preset's dataclass."""
    return parse(
        source.settings, load(source.preset).Settings, f"ingest.sources.{source.preset}.settings"
    )


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
    """Yield the rows of one source. Raises ParamsError if it has none, or if a field is missing in
    all of them."""
    limits = Limits(source.prompt_template, max_characters)
    row = None
    num_rows = 0
    num_missing = 0
    for found in candidates(source, folder):
        if isinstance(found, Candidate) and source.verifier is not None:
            found = replace(found, verifier=source.verifier)
        row = found if isinstance(found, Rejection) else clean(found, limits)
        num_rows += 1
        num_missing += isinstance(row, Rejection) and row.reason == "missing_field"
        yield row
    if row is None:
        raise ParamsError(
            f"ingest.sources[{index}] ({source.preset}) has no rows: check its settings"
        )
    if isinstance(row, Rejection) and num_missing == num_rows:
        raise ParamsError(
            f"ingest.sources[{index}] ({source.preset}): in every one of {num_rows} rows "
            f"{row.detail}. Check the names of the fields; the last row is {row.content[:300]}"
        )


def candidates(source: Source, folder: Path | None) -> Iterator[Candidate | Rejection]:
    """Yield the candidates of a source: those its module generates, or those it makes of a file's
    records."""
    module = load(source.preset)
    settings = settings_of(source)
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
