"""The rollouts of a finished run in place of its engine: training depends on nothing else."""

from collections.abc import Callable
from typing import Any

import polars as pl

from tasks.common.artifacts import TRAIN_ROLLOUTS, Layout
from tasks.engines.engine import Samples
from tasks.train.data.columns import UNFINISHED
from tasks.train.data.prompts import Prompts
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import Cost
from tasks.train.sampling.grading import samples_of
from tests.train.worlds import outputs, run

Prepare = Callable[[Trainer], object]
KEYS = ["group", "prompt_id", "sample_index"]


def rollouts_of(layout: Layout) -> pl.DataFrame:
    return TRAIN_ROLLOUTS.read(layout.train("r", 0) / "rollouts.parquet")


def check_repeated(
    layout: Layout, again: Layout, changes: dict[str, Any], prepare: Prepare = lambda _: None
) -> Trainer:
    """Check that training on the rollouts of a run gives its policy and its rollouts again."""
    trainer = run(again, changes, prepare=from_record(rollouts_of(layout), prepare))
    first, second = outputs(layout), outputs(again)
    assert first["weights"] == second["weights"]
    assert first["rollouts"] == second["rollouts"]
    return trainer


def from_record(rows: pl.DataFrame, prepare: Prepare = lambda _: None) -> Prepare:
    """Let a run train on the rollouts of a record (TRAIN_ROLLOUTS), by step, group, prompt and
    sample_index. Groups that are in flight, but not recorded at this step, get no tokens."""
    of_rollout = pl.col("version").repeat_by(pl.col("token_ids").list.len())
    fresh = rows.filter(~pl.col("replayed")).with_columns(
        pl.col("group", "sample_index").cast(pl.Int64),
        logprobs="sampler_logprobs",
        reason="finish_reason",
        versions=pl.coalesce("versions", of_rollout),
    )

    def replace(trainer: Trainer) -> None:
        prepare(trainer)
        collector, queue = trainer.collector, trainer.queue
        collect, sample = collector.collect, collector.sample
        samples: dict[str, Samples] = {}

        def collect_step(
            prompts: Prompts, table: pl.DataFrame, version: int, *more: Any, training: bool = True
        ) -> tuple[pl.DataFrame, Cost]:
            if training:
                step = fresh.filter(step=queue.batches[queue.num_complete].step)
                named = table.with_columns(prompt_id=prompts.ids[table["prompt_row"]])
                named = in_order(named, step) if getattr(queue, "num_early", 0) else named
                numbered = named.with_columns(sample_index=pl.int_range(pl.len()).over("group"))
                asked = numbered.filter(reason=UNFINISHED).select(KEYS)
                found = asked.join(step, on=KEYS, how="left", maintain_order="left")
                lists = pl.col("token_ids", "logprobs", "versions").fill_null([])
                ends = pl.col("reason").fill_null(UNFINISHED)
                samples["of step"] = samples_of(found.with_columns(lists, ends))
                table, version = named.drop("prompt_id"), 0  # the tokens have their own versions
            return collect(prompts, table, version, *more, training=training)

        def sample_step(request: Any, asked: Any, *more: Any) -> Samples:
            is_validation = asked.prompt_rows is None
            return sample(request, asked, *more) if is_validation else samples["of step"]

        collector.collect = collect_step  # type: ignore[assignment]
        collector.sample = sample_step  # type: ignore[method-assign]

    return replace


def in_order(table: pl.DataFrame, step: pl.DataFrame) -> pl.DataFrame:
    """Return the table with the recorded groups of a step first, in their order."""
    groups = pl.first("prompt_id"), pl.len()
    left, known = (
        t.group_by("group", maintain_order=True).agg(groups).rows() for t in (table, step)
    )
    order = list[int]()
    for _, *group in known:
        order.append(next(n for n, *other in left if other == group and n not in order))
    order += [n for n, *_ in left if n not in order]
    number = pl.col("group").replace_strict(order, range(len(order)))
    return table.with_columns(number).sort("group", maintain_order=True)
