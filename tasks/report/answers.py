"""Rollouts to read: what the initial and the trained policies answered on the test prompts.

`rollouts.parquet` holds all of them, a row a sample, with prompt and gold answer. The page holds
those of some prompts, chosen across the classes of change, for some policies, with long texts cut
in the middle. Both are made in one reading of the stages' files, some rows at a time: in memory is
what the page holds, and one part of a file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from pyarrow.parquet import ParquetFile

from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout
from tasks.common.files import ArtifactError
from tasks.common.table import Table
from tasks.report.evidence import Evidence
from tasks.report.leaderboard import Row
from tasks.report.paired import INITIAL, Paired

Json = dict[str, Any]
NUM_PROMPTS = 200  # on the page
MAX_RUNS = 4  # trained policies on the page, one a recipe
NUM_SAMPLES = 4  # of a policy on a prompt, on the page
MAX_LENGTH = 1500  # characters of a text on the page
BYTES_PER_PART = 32_000_000  # of a stage's file, about
# how a prompt's pass rate changed, in the order in which they are shown
CHANGES = ("newly solved", "better", "worse", "lost", "same", "always solved", "never solved")
TO_READ = Table(
    "rollouts to read",
    {
        "policy": pl.String,
        **{name: PROMPTS.columns[name] for name in ("prompt_id", "source", "level", "prompt")},
        "gold": pl.String,
        "sample_index": pl.Int32,
        "greedy": pl.Boolean,
        "outcome": pl.String,
        "reward": pl.Float64,
        "answer": pl.String,
        "text": pl.String,
    },
    {
        "policy": "sgpo/0",
        **{name: PROMPTS.example[name] for name in ("prompt_id", "source", "level", "prompt")},
        "gold": "7",
        "sample_index": 3,
        "greedy": False,
        "outcome": "correct",
        "reward": 1.0,
        "answer": "7",
        "text": "7",
    },
)
IN_PAGE = ("prompt_id", "sample_index", "greedy", "outcome")
SAMPLED = ("prompt_id", "sample_index", "greedy", "outcome", "reward", "answer", "text")


def change_of(before: float | None, after: float | None) -> str | None:
    """Return the class of a prompt by its pass rates; None where one of them is not known."""
    if before is None or after is None:
        return None
    if before == after:
        return {0.0: "never solved", 1.0: "always solved"}.get(before, "same")
    if after > before:
        return "better" if before else "newly solved"
    return "worse" if after else "lost"


def shown_runs(rows: Sequence[Row], champion: Mapping[str, Any] | None) -> list[str]:
    """Return the runs on the page: of each recipe the seed of the best validation, in the order of
    the leaderboard, the champion first."""
    best: dict[str, Row] = {}
    for row in rows:
        other = best.get(row["recipe"])
        if other is None or row["validation"] > other["validation"]:
            best[row["recipe"]] = row
    names = [f"{row['recipe']}/{row['seed']}" for row in best.values()]
    first = f"{champion['recipe']}/{champion['seed']}" if champion else ""
    return sorted(names, key=lambda name: name != first)[:MAX_RUNS]


def choose(changes: Mapping[str, str | None], count: int = NUM_PROMPTS) -> list[str]:
    """Return `count` prompts, as many of each class as there are, those of small classes all. An
    id is a digest, so that the first ones are chosen by chance, and the same every time."""
    classes: dict[str, list[str]] = {name: [] for name in CHANGES}
    for prompt_id, change in sorted(changes.items()):
        classes[change or "same"].append(prompt_id)
    chosen: list[str] = []
    rest = [ids for ids in classes.values() if ids]
    for place in range(max(map(len, rest), default=0)):
        chosen += [ids[place] for ids in rest if place < len(ids)]
    return chosen[:count]


def write_rollouts(
    path: Path, layout: Layout, evidence: Evidence, paired: Paired, runs: Sequence[str]
) -> Json:
    """Write `rollouts.parquet` and return what the page shows of it: the initial policy and the
    `runs`. Raises ArtifactError where a rollout's prompt is not among the test prompts."""
    prompts = read_prompts(layout.prompts("test"))
    rates = {row["prompt_id"]: row for row in paired.rates.to_dicts()}
    chosen = choose({key: change_of(row[INITIAL], row[runs[0]]) for key, row in rates.items()})
    samples: dict[str, list[pl.DataFrame]] = {name: [] for name in (INITIAL, *runs)}

    def keep(name: str, part: pl.DataFrame) -> None:
        if name in samples:
            rows = part.filter(pl.col("prompt_id").is_in(chosen))
            short = [pl.col(column).map_elements(cut, pl.String) for column in ("answer", "text")]
            samples[name].append(rows.select(*IN_PAGE, *short))

    TO_READ.write_parts(path, parts(layout, evidence, prompts, keep))
    table = {
        name: pl.concat(found).partition_by("prompt_id", as_dict=True)
        for name, found in samples.items()
        if found
    }
    asked = {row["prompt_id"]: row for row in prompts.to_dicts()}
    return {
        "runs": list(runs),
        "changes": list(CHANGES),
        "total": len(rates),
        "prompts": [shown(asked[key], rates[key], table, runs) for key in chosen],
    }


def read_prompts(path: Path) -> pl.DataFrame:
    """Return the test prompts with their gold answers."""
    columns = ("prompt_id", "source", "level", "prompt", "answer")
    return PROMPTS.read_columns(path, columns).rename({"answer": "gold"})


def parts(
    layout: Layout,
    evidence: Evidence,
    prompts: pl.DataFrame,
    keep: Callable[[str, pl.DataFrame], None],
) -> Iterator[pl.DataFrame]:
    """Yield the rollouts of the initial policy and of every run on test, with their prompts."""
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
    """Yield a ROLLOUTS table some rows at a time, without the columns that nobody reads here."""
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
    """Return a prompt of the page: what was asked, and of each policy its pass rate and samples."""
    key = (prompt["prompt_id"],)
    policies = {
        name: {
            "rate": rates[name],
            "change": change_of(rates[INITIAL], rates[name]),
            "samples": picked(samples[name][key]) if key in samples.get(name, {}) else [],
        }
        for name in (INITIAL, *runs)
    }
    words = {name: prompt[name] for name in ("source", "level", "gold")}
    asked = {"id": prompt["prompt_id"], "prompt": cut(prompt["prompt"]), **words}
    return {**asked, "policies": policies}


def picked(samples: pl.DataFrame) -> list[Json]:
    """Return some samples of a prompt: the first of each outcome, then the first ones."""
    rows = samples.sort("greedy", "sample_index", descending=[True, False]).to_dicts()
    firsts = {row["outcome"]: row for row in reversed(rows)}
    ordered = sorted(rows, key=lambda row: row is not firsts[row["outcome"]])[:NUM_SAMPLES]
    return [
        {
            "index": row["sample_index"],
            "greedy": row["greedy"],
            "outcome": row["outcome"],
            "answer": row["answer"],
            "text": row["text"],
        }
        for row in sorted(ordered, key=lambda row: (not row["greedy"], row["sample_index"]))
    ]


def cut(text: str) -> str:
    """Return a text, of a long one the beginning and the end, with how much is left out."""
    if len(text) <= MAX_LENGTH:
        return text
    half = MAX_LENGTH // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
