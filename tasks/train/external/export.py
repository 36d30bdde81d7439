"""Write a recipe's visits as the training data of another trainer, with a manifest of its origin
and of what the trainer's format cannot carry."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from tasks.common import params, registry
from tasks.common.files import ArtifactError, digest_file, whole_folder, write_json
from tasks.common.layout import Layout
from tasks.common.progress import progress
from tasks.engines.settings import Sampling
from tasks.grading.grader import Grader
from tasks.grading.settings import Verify
from tasks.models.policy import load_tokenizer, read_policy
from tasks.train.external import targets
from tasks.train.external.targets import Row, Target
from tasks.train.external.visits import Visits, as_visits, prompts
from tasks.train.settings import BatchSettings

USUAL_SIZE = 8  # of groups, where the trainer needs a number and the visits state none
CHUNK = 20_000  # rows in memory at a time
FILES = Path(targets.__file__).parent / "files"
STATE: dict[str, Any] = {  # of `datasets`, beside the names of the files
    "_fingerprint": "winnow",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


@dataclass(frozen=True)
class Options:
    """`is_plain`: the ground truth is the bare answer, for a reward of the user's own.
    `is_unordered`: a trainer that shuffles is accepted."""

    target: str
    is_plain: bool = False
    is_unordered: bool = False
    control_seed: int | None = None  # of an equally large random subset


@dataclass(frozen=True)
class Segment:
    """Consecutive visits for one file. `group_size` is None if each visit has its own."""

    name: str
    table: pl.DataFrame
    group_size: int | None


def target_of(name: str) -> Target:
    """Return a target. Raise ParamsError for an unknown one."""
    found: Target = registry.load(targets, name, "--to").TARGET
    return found


def check(visits: Visits, target: Target, options: Options) -> None:
    """Raise ParamsError if the target's format cannot carry these visits."""
    name = options.target
    if not target.keeps_order and not options.is_unordered and visits.is_plan:
        raise params.ParamsError(
            f"{name} shuffles its prompts, so the plan's order would be lost: --unordered exports "
            "all the same"
        )
    if target.is_chat and visits.table["messages"].has_nulls():
        one = visits.table.filter(pl.col("messages").is_null())["prompt_id"][0]
        raise params.ParamsError(
            f"{name} applies the policy's chat template to every prompt, and prompt {one} is plain "
            "text (the policy has no template, or its source is raw or has a prompt_template): use "
            "trl, verifiers, slime or parquet"
        )


def segments(visits: Visits, target: Target) -> list[Segment]:
    """Return the files of an export: one, or, for a trainer with one group size a file, one for
    each run of visits with the same size."""
    table = visits.table
    sizes = table["group_size"].unique()
    if len(sizes) == 1:
        return [Segment("train", table, int(sizes[0]) or None)]
    if target.sizes == "prompt":
        return [Segment("train", table, None)]
    numbered = table.with_columns(segment=pl.col("group_size").rle_id())
    parts = numbered.partition_by("segment", include_key=False, maintain_order=True)
    return [
        Segment(f"segments/{number:03d}_n{size}/train", part, size)
        for number, part in enumerate(parts)
        for size in [int(part["group_size"][0])]
    ]


def export(
    visits: Visits,
    options: Options,
    values: Mapping[str, Any],
    layout: Layout,
    cell: str,
    out: Path,
) -> dict[str, Any]:
    """Write an export to the new folder `out`, and return its manifest. Raise ParamsError if the
    target cannot carry the visits, and ArtifactError if `out` exists."""
    target = target_of(options.target)
    check(visits, target, options)
    if out.exists():
        raise ArtifactError(f"{out} exists: remove it, or name another folder with --out")
    sampling = params.section(values, "sampling", Sampling)
    with Grader(params.section(values, "verify", Verify)) as grader:
        versions = grader.versions(visits.table["verifier"].unique().to_list())
    batch = params.parse(values["train"]["batch"], BatchSettings, "train.batch")
    manifest: dict[str, Any] = {
        "from": cell,
        "target": options.target,
        "trainer_version": target.version,
        "digests": visits.digests,
        "sampling": asdict(sampling),
        "verifiers": versions,
        "not_carried": [*visits.not_carried, *target.notes],
        "segments": [],
    }
    held_out = as_visits(prompts(layout, "validation", has_rates=False))
    longest = longest_prompt(layout, visits.table, held_out)
    setup = {
        "policy": read_policy(layout).folder,
        "folder": out,
        "learning_rate": values["train"]["learning_rate"],
        "max_tokens": sampling.max_tokens,
        "prompt_tokens": longest,
        "total_tokens": longest + sampling.max_tokens,
        "temperature": sampling.temperature,
    }
    with whole_folder(out) as folder:
        write = partial(write_rows, target, options.is_plain)
        for segment in segments(visits, target):
            path = write(segment.table, folder / segment.name)
            own = of_segment(segment, path.relative_to(folder), batch)
            size = own["group_size"] or USUAL_SIZE
            rest = {"data": out / own["file"], "group_size": size, "batch": own["batch"]}
            text = target.settings.format(**setup, **rest, rollouts=size * own["batch"])
            (path.parent / "settings.txt").write_text(text)
            manifest["segments"].append(own)
        if options.control_seed is not None:
            control = random_subset(visits, layout, options.control_seed)
            write(control, folder / "control" / "train")
        write(held_out, folder / "validation")
        for name in () if options.is_plain else target.files:
            shutil.copy(FILES / f"{name}.txt", folder / name)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        manifest["files"] = {str(path.relative_to(folder)): digest_file(path) for path in files}
        write_json(folder / "manifest.json", manifest)
    return manifest


def of_segment(segment: Segment, file: Path, batch: BatchSettings) -> dict[str, Any]:
    """Return what the manifest states of a segment. A trainer drops an incomplete last batch."""
    rollouts = int(segment.table["group_size"].sum())
    mean = max(1.0, rollouts / len(segment.table))
    size = max(1, round(batch.size / mean)) if batch.unit == "rollouts" else batch.size
    return {
        "file": str(file),
        "visits": len(segment.table),
        "rollouts": rollouts or None,
        "visits_in_an_incomplete_batch": len(segment.table) % size,
        "group_size": segment.group_size,
        "batch": size,
    }


def longest_prompt(layout: Layout, *tables: pl.DataFrame) -> int:
    """Return the tokens of the longest prompt with the chat template. Trainers drop or cut what is
    longer than their own limit."""
    policy = read_policy(layout)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    names = ["prompt", "messages"]
    rows = pl.concat([table.select("prompt_id", *names).unique("prompt_id") for table in tables])
    template = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    return max(
        len(tokenizer(text)["input_ids"])
        if turns is None or tokenizer.chat_template is None
        else len(template(turns))
        for text, turns in rows.select(names).iter_rows()
    )


def random_subset(visits: Visits, layout: Layout, seed: int) -> pl.DataFrame:
    """Return visits of as many random training prompts as `visits` has, filtered by nothing, in as
    many passes, in groups of the mean size."""
    table, rng = visits.table, np.random.default_rng(seed)
    number, passes = table["prompt_id"].n_unique(), table["pass"].n_unique()
    every = prompts(layout)
    rows = rng.choice(len(every), number, replace=False)
    order = np.concatenate([rng.permutation(rows) for _ in range(passes)])
    return as_visits(every[order.tolist()], round(table["group_size"].sum() / len(table)))


def write_rows(target: Target, is_plain: bool, visits: pl.DataFrame, stem: Path) -> Path:
    """Write visits in a target's format to `stem` with its suffix, and return that path."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    parts = chunks(target, is_plain, visits)
    path = stem.with_suffix("" if target.format == "dataset" else f".{target.format}")
    if target.format == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            for part in parts:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        return path
    first = pa.Table.from_pylist(next(parts))
    tables = chain([first], (pa.Table.from_pylist(part, first.schema) for part in parts))
    if target.format == "parquet":
        with ParquetWriter(path, first.schema) as writer:
            for table in tables:
                writer.write_table(table)
        return path
    path.mkdir()  # as `datasets` saves a dataset
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, first.schema) as stream:
        for table in tables:
            stream.write_table(table)
    write_json(path / "dataset_info.json", {})
    write_json(path / "state.json", {**STATE, "_data_files": [{"filename": name}]})
    return path


def chunks(target: Target, is_plain: bool, visits: pl.DataFrame) -> Iterator[list[dict[str, Any]]]:
    """Yield a target's rows of visits in lists of at most CHUNK."""
    with progress(len(visits), "export", "visit") as bar:
        for part in visits.iter_slices(CHUNK):
            yield [
                target.row({**visit, "truth": truth_of(visit, is_plain)})
                for visit in part.iter_rows(named=True)
            ]
            bar.update(len(part))


def truth_of(visit: Row, is_plain: bool) -> str:
    """Return the ground truth of a visit: its answer, or also its prompt and verifier, by which
    rollouts are graded and read back."""
    if is_plain:
        return str(visit["answer"])
    names = ("prompt_id", "verifier", "answer")
    return json.dumps({name: visit[name] for name in names}, ensure_ascii=False)
