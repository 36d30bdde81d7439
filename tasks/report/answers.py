"""Rollouts to read: the answers of the initial and the trained policies to the test prompts.

`rollouts.parquet` contains all of them, one row per sample, with prompt and gold answer. The page
contains the rollouts of up to NUM_PROMPTS prompts, from all classes of change, for up to MAX_RUNS
trained policies; the middle of long texts is left out. Both are made in one pass over the stages'
files. Only the page's content and one part of a file are in memory at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from pyarrow.parquet import ParquetFile

from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout, Table
from tasks.common.files import ArtifactError
from tasks.report.evidence import Evidence
from tasks.report.paired import INITIAL
from tasks.report.results import Results, Row, best_seed, name_of

Json = dict[str, Any]
NUM_PROMPTS = 200  # prompts on the page
MAX_RUNS = 4  # trained policies on the page, one per recipe
NUM_SAMPLES = 4  # per policy and prompt, on the page
MAX_LENGTH = 1500  # characters per text on the page
BYTES_PER_PART = 32_000_000  # approximate size of a part of a stage's file
# classes of change of a prompt's pass rate, in display order
CHANGES = ("newly solved", "better", "worse", "lost", "same", "always solved", "never solved")
IN_PAGE = ("prompt_id", "sample_index", "greedy", "outcome")
SAMPLED = ("prompt_id", "sample_index", "greedy", "outcome", "reward", "answer", "text")
TO_READ = Table(
    "rollouts to read",
    {
        "policy": (pl.String, "sgpo/0"),
        **{name: PROMPTS.fields[name] for name in ("prompt_id", "source", "level", "prompt")},
        "gold": (pl.String, "7"),
        **{name: ROLLOUTS.fields[name] for name in SAMPLED},
    },
)


def change_of(before: float | None, after: float | None) -> str | None:
    """Return the class in CHANGES for a prompt's pass rates; None if one of them is unknown."""
    if before is None or after is None:
        return None
    if before == after:
        return {0.0: "never solved", 1.0: "always solved"}.get(before, "same")
    if after > before:
        return "better" if before else "newly solved"
    return "worse" if after else "lost"


def shown_runs(rows: Sequence[Row], champion: Mapping[str, Any] | None) -> list[str]:
    """Return at most MAX_RUNS runs for the page: each recipe's seed with the best validation
    accuracy. The champion comes first, then the others in the order of the leaderboard."""
    recipes = dict.fromkeys(row["recipe"] for row in rows)
    names = [name_of(best_seed(rows, recipe)) for recipe in recipes]
    first = name_of(champion) if champion else ""
    return sorted(names, key=lambda name: name != first)[:MAX_RUNS]


def choose(changes: Mapping[str, str | None], count: int = NUM_PROMPTS) -> list[str]:
    """Return at most `count` prompt ids: an equal number of each class, or all of a small class
    (None counts as `same`). Ids are digests, so the first are a random but reproducible choice."""
    classes: dict[str, list[str]] = {name: [] for name in CHANGES}
    for prompt_id, change in sorted(changes.items()):
        classes[change or "same"].append(prompt_id)
    prompt_ids: list[str] = []
    rest = [ids for ids in classes.values() if ids]
    for place in range(max(map(len, rest), default=0)):
        prompt_ids += [ids[place] for ids in rest if place < len(ids)]
    return prompt_ids[:count]


def write_rollouts(path: Path, layout: Layout, results: Results, runs: Sequence[str]) -> Json:
    """Write `rollouts.parquet`. Return the page's part: samples of the initial policy and of `runs`
    for prompts chosen by the first run's changes. Raise ArtifactError for an unknown prompt."""
    columns = ("prompt_id", "source", "level", "prompt", "answer")
    prompts = PROMPTS.read_columns(layout.prompts("test"), columns).rename({"answer": "gold"})
    rates = {row["prompt_id"]: row for row in results.paired.rates.to_dicts()}
    prompt_ids = choose({key: change_of(row[INITIAL], row[runs[0]]) for key, row in rates.items()})
    samples: dict[str, list[pl.DataFrame]] = {name: [] for name in (INITIAL, *runs)}

    def keep(name: str, part: pl.DataFrame) -> None:
        if name in samples:
            rows = part.filter(pl.col("prompt_id").is_in(prompt_ids))
            short = [pl.col(column).map_elements(cut, pl.String) for column in ("answer", "text")]
            samples[name].append(rows.select(*IN_PAGE, *short))

    TO_READ.write_parts(path, parts(layout, results.evidence, prompts, keep))
    table = {
        name: pl.concat(tables).partition_by("prompt_id", as_dict=True)
        for name, tables in samples.items()
    }
    by_id = {row["prompt_id"]: row for row in prompts.to_dicts()}
    return {
        "runs": list(runs),
        "changes": list(CHANGES),
        "total": len(rates),
        "prompts": [shown(by_id[key], rates[key], table, runs) for key in prompt_ids],
    }


def parts(
    layout: Layout,
    evidence: Evidence,
    prompts: pl.DataFrame,
    keep: Callable[[str, pl.DataFrame], None],
) -> Iterator[pl.DataFrame]:
    """Yield all test rollouts in parts, with their prompts; call `keep(policy, part)` for each."""
    folders = {INITIAL: layout.baseline}
    folders |= {run.name: layout.evaluation(run.recipe, run.seed) for run in evidence.trained}
    for name, folder in folders.items():
        path = folder / "rollouts.parquet"
        for part in read_parts(path):
            known = part.join(prompts, on="prompt_id", how="left", maintain_order="left")
            unknown = known.filter(pl.col("prompt").is_null())
            if len(unknown):
                raise ArtifactError(
                    f"{path}: prompt {unknown['prompt_id'][0]} is not among the test prompts: run "
                    "`baseline` and `evaluate` again"
                )
            rows = known.with_columns(pl.lit(name).alias("policy")).select(list(TO_READ.columns))
            keep(name, rows)
            yield rows


def read_parts(path: Path) -> Iterator[pl.DataFrame]:
    """Yield a ROLLOUTS table in parts of about BYTES_PER_PART, with the columns SAMPLED."""
    ROLLOUTS.verify(path)
    with ParquetFile(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        per_row = sum(group.total_byte_size for group in groups) / max(file.metadata.num_rows, 1)
        num_rows = int(BYTES_PER_PART / max(per_row, 1)) + 1
        for batch in file.iter_batches(num_rows, columns=list(SAMPLED)):
            yield pl.DataFrame(batch)


def shown(
    prompt: Json,
    rates: Mapping[str, float | None],
    samples: Mapping[str, Mapping[tuple[Any, ...], pl.DataFrame]],
    runs: Sequence[str],
) -> Json:
    """Return a prompt as data for the page, with the pass rate and samples of each policy."""
    key = (prompt["prompt_id"],)
    policies = {
        name: {
            "rate": rates[name],
            "change": change_of(rates[INITIAL], rates[name]),
            "samples": picked(samples[name][key]),
        }
        for name in (INITIAL, *runs)
    }
    words = {name: prompt[name] for name in ("source", "level", "gold")}
    texts = {"id": prompt["prompt_id"], "prompt": cut(prompt["prompt"]), **words}
    return {**texts, "policies": policies}


def picked(samples: pl.DataFrame) -> list[Json]:
    """Return at most NUM_SAMPLES samples of a prompt, preferably the first of each outcome."""
    named = samples.select(pl.col("sample_index").alias("index"), *IN_PAGE[2:], "answer", "text")
    rows = named.sort("greedy", "index", descending=[True, False]).to_dicts()
    firsts = {row["outcome"]: row for row in reversed(rows)}
    ordered = sorted(rows, key=lambda row: row is not firsts[row["outcome"]])[:NUM_SAMPLES]
    return sorted(ordered, key=lambda row: (not row["greedy"], row["index"]))


def cut(text: str) -> str:
    """Return a text, or the start and end of a long one, with the number of characters left out."""
    if len(text) <= MAX_LENGTH:
        return text
    half = MAX_LENGTH // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
