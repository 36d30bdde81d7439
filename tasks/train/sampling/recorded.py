"""The rollouts of a finished run (TRAIN_ROLLOUTS) in place of sampling (`--from-rollouts`)."""

import polars as pl

from tasks.common.files import ArtifactError
from tasks.train.rollouts import UNFINISHED

OTHER = "the record is of another run"


def of_step(record: pl.DataFrame | None, step: int) -> pl.DataFrame | None:
    """Return the record's fresh rollouts of a step, with the column names of a table of rollouts;
    None without a record."""
    if record is None:
        return None
    fresh = record.filter((pl.col("step") == step) & ~pl.col("replayed"))
    of_rollout = pl.col("version").repeat_by(pl.col("token_ids").list.len())
    return fresh.select(
        pl.col("group", "sample_index").cast(pl.Int64),
        "prompt_id",
        "token_ids",
        "is_action",
        logprobs="sampler_logprobs",
        reason="finish_reason",
        versions=pl.coalesce("versions", of_rollout),
    ).sort("group", "sample_index")


def of_groups(
    record: pl.DataFrame, table: pl.DataFrame, ids: pl.Series, step: int, version: int | None
) -> pl.DataFrame:
    """Return the recorded rollouts that replace the unfinished ones of `table`. Raise ArtifactError
    if the record has other groups. All tokens get the policy version `version`, because a step may
    have made an update on one machine but not the other; with None they keep the recorded one."""
    wanted = table.select(
        "group",
        "reason",
        sample_index=pl.int_range(pl.len()).over("group"),
        asked=ids_of(table, ids),
    ).filter(pl.col("reason") == UNFINISHED)
    keys = ["group", "sample_index"]
    found = wanted.drop("reason").join(record, on=keys, how="left", maintain_order="left")
    pairs = found.group_by("group", maintain_order=True).agg(
        pl.first("asked"), pl.len(), pl.first("prompt_id"), num=pl.col("prompt_id").count()
    )
    asked, theirs = pairs.select("asked", "len").rows(), pairs.select("prompt_id", "num").rows()
    if theirs != asked:
        raise ArtifactError(
            f"step {step}: the record has (prompt, rollouts) {theirs}, but train.control requests "
            f"{asked}: {OTHER}"
        )
    if version is not None:
        found = found.with_columns(
            pl.lit(version).repeat_by(pl.col("token_ids").list.len()).alias("versions")
        )
    return found


def chosen(
    record: pl.DataFrame, table: pl.DataFrame, ids: pl.Series, step: int
) -> tuple[pl.DataFrame, int]:
    """Return the table with the recorded step's groups first, in the record's order, and all groups
    renumbered; and the number of recorded groups. Raise ArtifactError if the table lacks one."""
    left = table.group_by("group", maintain_order=True).agg(pl.first("prompt_row"), pl.len())
    known = left.select("group", prompt_id=ids_of(left, ids), num="len").rows()
    taken = list[int]()
    sizes = record.group_by("group", maintain_order=True).agg(pl.first("prompt_id"), pl.len())
    for prompt_id, num in sizes.select("prompt_id", "len").rows():
        fits = [n for n, *pair in known if pair == [prompt_id, num] and n not in taken]
        if not fits:
            raise ArtifactError(
                f"step {step}: the record has {num} rollouts of {prompt_id}, which are not in "
                f"flight: {OTHER}"
            )
        taken.append(fits[0])
    order = [*taken, *(n for n, *_ in known if n not in taken)]
    number = pl.col("group").replace_strict(order, range(len(order)))
    return table.with_columns(number).sort("group", maintain_order=True), len(taken)


def check_all(record: pl.DataFrame, num_rollouts: int, step: int) -> None:
    """Raise ArtifactError unless the record has exactly the step's `num_rollouts` rollouts."""
    if len(record) != num_rollouts:
        raise ArtifactError(
            f"step {step}: the record has {len(record)} rollouts, but train.control requests "
            f"{num_rollouts}: {OTHER}"
        )


def ids_of(table: pl.DataFrame, ids: pl.Series) -> pl.Series:
    """Return the prompt id of each row of `table`; `ids` are those of the training prompts."""
    return ids[table["prompt_row"]]
