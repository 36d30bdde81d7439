"""The tables of the pipeline: the columns of each, and an example row. Stages exchange data only in
files.

A table is checked when it is written and again when it is read: a wrong column is an error that
names the file. The file has a checksum (see `checksums`), so damage on the disk is an error as
well."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
from pyarrow.parquet import ParquetWriter

from tasks.common.checksums import METADATA, DamagedError, add_checksum, verify_file
from tasks.common.files import ArtifactError, replace_file
from tasks.common.layout import Layout as Layout
from tasks.common.recovery import how_to_restore

OUTCOMES = ("correct", "wrong", "unparsed", "truncated", "timeout", "error")
SPLITS = ("train", "validation", "test")
PHASES = ("profile", "generate", "score", "update", "evaluate", "branch")

Columns = Mapping[str, tuple[pl.DataType | type[pl.DataType], Any]]


@dataclass(frozen=True)
class Table:
    """One kind of table: its name, and the type and an example value of every column. In tables
    written before the `later` columns existed, these columns are read as nulls."""

    name: str
    fields: Columns
    later: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> dict[str, pl.DataType | type[pl.DataType]]:
        """Return the columns in order, with their types."""
        return {name: dtype for name, (dtype, _) in self.fields.items()}

    @cached_property
    def example(self) -> dict[str, Any]:
        return {name: value for name, (_, value) in self.fields.items()}

    def frame(self, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
        """Return a table of these rows, with exactly this table's columns and types."""
        return pl.DataFrame(list(rows), schema=self.columns, orient="row")

    def check(self, frame: pl.DataFrame, where: str) -> pl.DataFrame:
        """Return `frame` with the columns in order. Raise an ArtifactError naming `where` and each
        difference."""
        missing = [name for name in self.columns if name not in frame.columns]
        unknown = [name for name in frame.columns if name not in self.columns]
        wrong = [
            f"{name} is {frame.schema[name]}, not {dtype}"
            for name, dtype in self.columns.items()
            if name in frame.columns and frame.schema[name] != dtype
        ]
        if missing or unknown or wrong:
            problems = (
                [f"missing: {missing}"] * bool(missing)
                + [f"unknown: {unknown}"] * bool(unknown)
                + wrong
            )
            raise ArtifactError(f"{where} is not a {self.name} table: {'; '.join(problems)}")
        return frame.select(list(self.columns))

    def write(self, path: Path, frame: pl.DataFrame) -> None:
        """Check `frame` and write it atomically as Parquet."""
        checked = self.check(frame, str(path))

        def write_all(file: BinaryIO) -> None:
            checked.write_parquet(file, compression="zstd", metadata=METADATA)
            add_checksum(file)

        replace_file(path, write_all)

    def write_parts(self, path: Path, parts: Iterable[pl.DataFrame]) -> None:
        """Write `parts` as one table, as `write` does, with only one part in memory at a time."""
        empty = self.frame([]).to_arrow(compat_level=pl.CompatLevel.oldest())
        schema = empty.schema.with_metadata(METADATA)

        def write_all(file: BinaryIO) -> None:
            with ParquetWriter(file, schema, compression="zstd") as writer:
                for part in parts:
                    writer.write_table(
                        self.check(part, str(path)).to_arrow(compat_level=pl.CompatLevel.oldest())
                    )
            add_checksum(file)

        replace_file(path, write_all)

    def read_columns(
        self, path: Path, columns: Sequence[str], where: pl.Expr | None = None
    ) -> pl.DataFrame:
        """Return `columns` of the rows that satisfy `where`. The types of all columns are checked,
        but only `columns` are decoded: texts and tokens take gigabytes, and few callers read them.
        Raise the same errors as `read`."""
        self.verify(path)
        try:
            rows = self.completed(pl.scan_parquet(path))
            self.check(rows.head(0).collect(), str(path))
            if where is not None:
                rows = rows.filter(where)
            return rows.select(list(columns)).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ArtifactError(f"{path} cannot be read as Parquet: {error}") from error

    def read(self, path: Path) -> pl.DataFrame:
        """Read and check a table. Raise ArtifactError if the file is missing, damaged or has other
        columns."""
        return self.read_columns(path, list(self.columns))

    def completed(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        """Return the rows, with nulls in the `later` columns that their file lacks."""
        there = rows.collect_schema().names()
        missing = {name: self.columns[name] for name in self.later if name not in there}
        return rows.with_columns(
            pl.lit(None, dtype=dtype).alias(name) for name, dtype in missing.items()
        )

    def verify(self, path: Path) -> None:
        """Raise ArtifactError if the file is missing or has changed since it was written."""
        if not path.exists():
            raise ArtifactError(f"{path} does not exist: create it with `winnow run`")
        try:
            verify_file(path)
        except DamagedError as error:
            raise ArtifactError(
                f"{path} is damaged, or of an earlier version: {error}. {how_to_restore(path)}"
            ) from error


PROMPTS = Table(
    "prompts",
    {
        "prompt_id": (pl.String, "5d41402abc4b2a76"),
        "prompt": (
            pl.String,
            "State the final answer to the following arithmetic problem: 4 + 3 =",
        ),
        "messages": (
            pl.String,
            '[{"role": "user", "content": "State the final answer to ... 4 + 3 ="}]',
        ),
        "template": (pl.String, "Question: {prompt}"),
        "answer": (pl.String, "7"),
        "verifier": (pl.String, "numeric"),
        "source": (pl.String, "reasoning_gym/chain_sum"),
        "level": (pl.String, "2"),
        "solution": (pl.String, "4 + 3 = 7, so the answer is 7"),
    },
    later=("solution",),
)
"""For a plain prompt, `messages` is null and `template` is the text around the prompt, which
replaces `{prompt}`. If both are null, the prompt is a user message if the policy has a chat
template, and is otherwise sampled unchanged. For a chat, `messages` is a JSON list of messages with
role and content, which the policy's chat template renders, and `prompt` is only the question, for
readers. The example shows both. `solution` is a worked solution, null if the source has none."""

REJECTED = Table(
    "rejected",
    {
        "source": (pl.String, "math.json"),
        "line": (pl.Int64, 887),
        "reason": (pl.String, "empty_answer"),
        "detail": (pl.String, "field 'answer' is null"),
        "content": (pl.String, '{"problem": "...", "answer": null}'),
    },
)

CONTAMINATION = Table(
    "contamination",
    {
        "kind": (pl.String, "near"),
        "overlap": (pl.Float64, 0.83),
        "source": (pl.String, "math"),
        "line": (pl.Int64, 12),
        "prompt": (pl.String, "What is the sum of all primes below 10?"),
        "eval_split": (pl.String, "test"),
        "eval_prompt_id": (pl.String, "5d41402abc4b2a76"),
        "eval_source": (pl.String, "verl/deepscaler"),
        "eval_line": (pl.Int64, 7),
        "eval_prompt": (pl.String, "Find the sum of all primes below 10."),
    },
)
"""One row per pair of a prompt dropped from training and a matching prompt of an evaluation split.
`kind` is exact (but for case and whitespace) or near; `overlap` is the share of common n-grams."""

SAMPLE: Columns = {  # the first columns of a rollout for training
    "prompt_id": (pl.String, "5d41402abc4b2a76"),
    "sample_index": (pl.Int32, 3),
    "outcome": (pl.String, "correct"),
    "reward": (pl.Float64, 1.0),
}

ROLLOUTS = Table(
    "rollouts",
    {
        "prompt_id": (pl.String, "5d41402abc4b2a76"),
        "sample_index": (pl.Int32, 3),
        "greedy": (pl.Boolean, False),
        "outcome": (pl.String, "correct"),
        "reward": (pl.Float64, 1.0),
        "score": (pl.Float64, 1.0),
        "parts": (pl.List(pl.Struct({"verifier": pl.String, "score": pl.Float64})), []),
        "answer": (pl.String, "7"),
        "text": (pl.String, "7"),
        "finish_reason": (pl.String, "stop"),
        "prompt_tokens": (pl.Int32, 9),
        "completion_tokens": (pl.Int32, 2),
    },
)

"""`score` is the verifier's own score in [0, 1] if it returns one, else 1 for `correct` and 0 for
other outcomes. `parts` are the scores of a composite's verifiers. `reward` is their weighted sum
for a composite; for any other verifier it is 1 for `correct` and 0 for other outcomes."""

IMPORTED = Table(
    "imported rollouts",
    {**ROLLOUTS.fields, "step": (pl.Int64, 1), "trainer_score": (pl.Float64, 1.0)},
)
"""Rollouts of another trainer (`winnow import`), with the verdicts of this root's verifiers."""

SAMPLES = Table(
    "samples",
    {
        **SAMPLE,
        "finish_reason": (pl.String, "stop"),
        "token_ids": (pl.List(pl.Int32), [11, 2]),
        "logprobs": (pl.List(pl.Float32), [-0.1, -0.01]),
    },
)
"""The rollouts of a profile as tokens, for training; `logprobs` is null if the engine did not
store them (`store.logprobs`)."""

PROFILE = Table(
    "profile",
    {
        "prompt_id": (pl.String, "5d41402abc4b2a76"),
        "num_samples": (pl.Int32, 8),
        "correct": (pl.Int32, 2),
        "wrong": (pl.Int32, 5),
        "unparsed": (pl.Int32, 0),
        "truncated": (pl.Int32, 1),
        "timeout": (pl.Int32, 0),
        "error": (pl.Int32, 0),
        "pass_rate": (pl.Float64, 0.25),
        "pass_rate_low": (pl.Float64, 0.0715),
        "pass_rate_high": (pl.Float64, 0.5907),
        "pass_rate_unbiased": (pl.Float64, 0.25),
        "prompt_tokens": (pl.Int32, 9),
        "completion_tokens": (pl.Int64, 96),
        "completion_tokens_max": (pl.Int32, 32),
        "truncated_rate": (pl.Float64, 0.125),
    },
)
"""`num_samples` counts all samples, including `error`; pass_rate = correct / (num_samples - error),
null if every sample was an error; the interval is Wilson's, 95 %; `completion_tokens` is the sum
over the samples. If `profile.stop` is set, `num_samples` differs between prompts and pass_rate is
biased; the mean of `pass_rate_unbiased` over prompts is not."""

PLAN = Table(
    "plan",
    {
        "visit": (pl.Int64, 0),
        "pass": (pl.Int32, 0),
        "phase": (pl.Int32, 0),
        "order": (pl.Int64, 0),
        "prompt_id": (pl.String, "5d41402abc4b2a76"),
        "group_size": (pl.Int32, 4),
    },
)
"""One row per visit, in the order of training. `phase` increases over the whole plan (a step never
spans two phases); `order` is the position within the phase."""

DECISIONS = Table(
    "decisions",
    {
        "prompt_id": (pl.String, "5d41402abc4b2a76"),
        "pass_rate": (pl.Float64, 0.25),
        "decision": (pl.String, "learnable"),
        "group_size": (pl.Int32, 4),
        "reason": (pl.String, "solved 2 of 8: one success expected in 4 rollouts"),
    },
)

FLOPS: Columns = {
    "flops_charged": (pl.Float64, 3.1e9),
    "flops_charged_mixed": (pl.Float64, 2.2e9),
}

STEPS = Table(
    "steps",
    {
        "step": (pl.Int64, 0),
        "pass": (pl.Int32, 0),
        "phase": (pl.Int32, 0),
        "num_prompts": (pl.Int32, 4),
        "num_rollouts": (pl.Int32, 32),
        "num_replayed": (pl.Int32, 0),
        "num_kept": (pl.Int32, 32),
        "num_mixed_groups": (pl.Int32, 3),
        "updated": (pl.Boolean, True),
        "num_updates": (pl.Int32, 1),
        "nonfinite": (pl.Boolean, False),
        "reward_mean": (pl.Float64, 0.41),
        "reward_mean_kept": (pl.Float64, 0.41),
        "learning_rate": (pl.Float64, 3e-4),
        "loss": (pl.Float64, -0.01),
        "grad_norm": (pl.Float64, 0.4),
        "entropy": (pl.Float64, 0.3),
        "clip_rate": (pl.Float64, 0.0),
        "weight_capped_rate": (pl.Float64, 0.0),
        "weight_ess_rate": (pl.Float64, 1.0),
        "kl": (pl.Float64, 0.0),
        "log_ratio_mean": (pl.Float64, 1e-7),
        "log_ratio_p01": (pl.Float64, -1e-6),
        "log_ratio_p50": (pl.Float64, 0.0),
        "log_ratio_p99": (pl.Float64, 1e-6),
        "log_ratio_max": (pl.Float64, 3e-6),
        "completion_tokens_mean": (pl.Float64, 14.5),
        "completion_tokens_p95": (pl.Float64, 29.0),
        "completion_tokens_max": (pl.Int32, 31),
        "truncated_rate": (pl.Float64, 0.0),
        "error_rate": (pl.Float64, 0.0),
        "tokens": (pl.Int64, 900),
        **FLOPS,
        "flops_charged_paper": (pl.Float64, 3.1e9),
        "flops_executed": (pl.Float64, 2.2e9),
    },
)
"""The `flops_` columns are running totals of training, this step included, without profiling
and validation. `num_mixed_groups` counts sampled groups, before `select`. `log_ratio_mean` and
`log_ratio_max` are of absolute values; the quantiles are signed, trainer minus sampler, before any
clip. `weight_ess_rate` is the effective sample size of the importance weights as a share of the
tokens, and `weight_capped_rate` is the share of tokens whose weight was capped. `updated` is false
if no rollout had a gradient or the gradient was not finite."""

CURVE = Table(
    "curve",
    {
        "step": (pl.Int64, 12),
        **FLOPS,
        "flops_executed": (pl.Float64, 3.0e10),
        "rollouts": (pl.Int64, 384),
        "accuracy": (pl.Float64, 0.52),
        "accuracy_low": (pl.Float64, 0.48),
        "accuracy_high": (pl.Float64, 0.56),
        "branch": (pl.Float64, 0.25),
    },
)
"""Validation accuracy after `step` steps (step 0: before training); the flops columns are
training's running totals. `branch` is the share of the run at which a decayed branch ended, null
on the trunk."""

TRAIN_ROLLOUTS = Table(
    "train rollouts",
    {
        "step": (pl.Int64, 0),
        "group": (pl.Int32, 0),
        **SAMPLE,
        "kept": (pl.Boolean, True),
        "advantage": (pl.Float64, 1.0),
        "finish_reason": (pl.String, "stop"),
        "prompt_tokens": (pl.Int32, 9),
        "version": (pl.Int64, 0),
        "replayed": (pl.Boolean, False),
        "token_ids": (pl.List(pl.Int32), [11, 2]),
        "sampler_logprobs": (pl.List(pl.Float32), [-0.1, -0.01]),
        "is_action": (pl.List(pl.Boolean), [True, True]),
        "versions": (pl.List(pl.Int64), [0, 1]),
        "text": (pl.String, "7"),
    },
    later=("versions",),
)
"""`version` is the number of updates of the policy that sampled the rollout's oldest token.
`is_action` marks the policy's own tokens, as opposed to an environment's; null if all are its own.
`versions` is each token's version; null if all tokens of the step have their rollout's version."""

STORE = Table(
    "rollout store",
    {
        "prompt_digest": (pl.String, "0cc175b9c0f1b6a8"),
        "sample_index": (pl.Int32, 3),
        "token_ids": (pl.List(pl.Int32), [11, 2]),
        "logprobs": (pl.List(pl.Float32), [-0.5, -0.25]),
        "text": (pl.String, "7"),
        "finish_reason": (pl.String, "stop"),
        "prompt_tokens": (pl.Int32, 9),
        "completion_tokens": (pl.Int32, 2),
        "flops": (pl.Float64, 1.1e7),
        "seconds": (pl.Float64, 0.0004),
        "engine": (pl.String, "hf"),
        "engine_version": (pl.String, "5.19.0"),
    },
)
"""One shard of the store. Its folder's `sampling.json` has policy digest, parameters and base seed.
`logprobs` are those of the sampling distribution; they are null if `store.logprobs` was off."""
