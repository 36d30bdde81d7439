"""From the entries of `ingest.sources` to clean rows and rejections."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.common import registry
from tasks.common.params import ParamsError, parse
from tasks.common.progress import progress
from tasks.ingest import sources as presets
from tasks.ingest.candidates import Rejection, Row, clean


@dataclass(frozen=True)
class Source:
    """One entry of `ingest.sources`. `prompt_template` holds `{prompt}` once (`Question: {prompt}\\nAnswer:`)."""

    preset: str
    settings: dict[str, Any]
    prompt_template: str | None


def load(preset: str) -> Any:
    """The module of a preset; ParamsError lists those there are."""
    return registry.load(presets, preset, "ingest.sources: the preset")


def sources(entries: list[dict[str, Any]]) -> list[Source]:
    """The entries, checked. A `prompt_template` may be left out: the prompt is then used verbatim."""
    if not entries:
        raise ParamsError("ingest.sources names no source")
    parsed = [
        parse({"prompt_template": None, **entry}, Source, f"ingest.sources[{index}]")
        for index, entry in enumerate(entries)
    ]
    for source in parsed:
        check(source)
    return parsed


def check(source: Source) -> None:
    """ParamsError for a template without its place for the prompt, or settings that the preset does not know."""
    if source.prompt_template is not None and source.prompt_template.count("{prompt}") != 1:
        raise ParamsError(f"ingest.sources: prompt_template {source.prompt_template!r} must hold {{prompt}} once")
    parse(source.settings, load(source.preset).Settings, f"ingest.sources.{source.preset}.settings")


def read(chosen: list[Source]) -> Iterator[Row | Rejection]:
    """Every row of every source, clean or rejected, in order."""
    with progress(None, "ingest", "row") as bar:
        for source in chosen:
            module = load(source.preset)
            where = f"ingest.sources.{source.preset}.settings"
            for found in module.read(parse(source.settings, module.Settings, where)):
                bar.update()
                yield found if isinstance(found, Rejection) else clean(found, source.prompt_template)
