"""The prompts of each split: those in its file or, before `ingest` has run, those that the rows of
the sources would give. Also the tokens of a prompt."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
from tokenizers import Tokenizer

from flows.doctor import places
from flows.doctor.ranges import NOTHING, Range, exactly
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.params import ParamsError, section
from tasks.ingest import reading
from tasks.ingest.candidates import Row
from tasks.ingest.settings import Ingest, Source
from tasks.models.folder import has_chat_template, loading

MAX_ROWS = 20_000  # read of a local file
NUM_TEXTS = 200  # rows of another source, and texts that are encoded
UNKNOWN = Range(100.0, 10_000.0, 1e6)  # rows of a file that is not on this machine
UNKNOWN_PROMPT = Range(16.0, 100.0, 400.0)  # tokens, before any prompt exists
TOKENS_PER_CHARACTER = Range(1.0 / 6.0, 0.25, 1.0)  # with an unknown tokenizer
TURN_TOKENS = Range(4.0, 16.0, 40.0)  # of a chat template around a prompt


def expected(values: Mapping[str, Any], layout: Layout) -> tuple[dict[str, Range], list[str]]:
    """Return the number of prompts in each split, and some of the prompts."""
    settings = section(values, "ingest", Ingest)
    own, texts, prompts = dict[str | None, Range](), list[str](), {}
    for number, source in enumerate(reading.sources(settings.sources)):
        number_of_rows = UNKNOWN
        with suppress(ParamsError, ArtifactError):  # reported by `places.check_data`
            number_of_rows, some = rows_of(number, source, settings.max_prompt_characters)
            texts += some
        own[source.split] = own.get(source.split, NOTHING) + number_of_rows
    rest = own.get(None, NOTHING)
    for name in ("test", "validation", "train"):  # the order in which `ingest` fills them
        size = getattr(settings.splits, name)
        prompts[name] = own.get(name, rest) if size is None else exactly(size)
        if name not in own:
            left = zip(rest, prompts[name], strict=True)
            rest = Range(*(max(there - taken, 1.0) for there, taken in left))
        with suppress(OSError, pl.exceptions.PolarsError):
            prompts[name] = exactly(num_written(layout.prompts(name), size))
    return prompts, texts


def num_written(path: Path, limit: int | None) -> int:
    """Return the number of rows that `ingest` wrote into a split's file, at most `limit`."""
    num = int(pl.scan_parquet(path).select(pl.len()).collect().item())
    return num if limit is None else min(num, limit)


def rows_of(number: int, source: Source, longest: int | None) -> tuple[Range, list[str]]:
    """Return how many different questions of a source can be used, and some of its prompts."""
    path = str(source.settings.get("path", ""))
    if "://" in path:
        return UNKNOWN, []
    limit = MAX_ROWS if path else NUM_TEXTS
    found = list(reading.rows(number, source, longest, None, limit))
    usable = [row for row in found if isinstance(row, Row)]
    num = exactly(len({row.question for row in usable}) if path else source.settings["num_prompts"])
    if path and len(found) == limit:
        num = Range(num.low, 5.0 * num.low, 50.0 * num.low)
    num = num if source.max_rows is None else num.at_most(source.max_rows)
    return num, [row.prompt for row in usable[:NUM_TEXTS]]


def prompt_tokens(values: Mapping[str, Any], layout: Layout, texts: Sequence[str]) -> Range:
    """Return the mean number of tokens of a prompt, by the policy's tokenizer if it is here."""
    if not texts:
        return UNKNOWN_PROMPT
    characters, source = sum(map(len, texts)) / len(texts), values["policy"]["source"]
    folder = layout.policy if source == "tiny" else places.model_folder(source)
    if folder is not None and (folder / "tokenizer.json").is_file():
        with suppress(ArtifactError), loading(folder, "the tokenizer"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokens = exactly(sum(map(len, tokenizer.encode_batch(list(texts)))) / len(texts))
            return tokens + TURN_TOKENS if has_chat_template(folder) else tokens
    return exactly(characters) * TOKENS_PER_CHARACTER
