"""The rollouts of a finished run (TRAIN_ROLLOUTS) in the place of sampling (`--from-rollouts`)."""

import itertools
from collections.abc import Sequence

import polars as pl

from tasks.common.files import ArtifactError
from tasks.train.sampling.groups import Group, Rollout


def of_step(record: pl.DataFrame | None, step: int) -> pl.DataFrame | None:
    """The rollouts that the record has as fresh ones of a step; None without a record."""
    if record is None:
        return None
    mine = record.filter((pl.col("step") == step) & ~pl.col("replayed"))
    return mine.sort("group", "sample_index")


def of_groups(
    record: pl.DataFrame, groups: Sequence[Group], numbers: Sequence[int], ids: pl.Series, step: int
) -> list[list[Rollout]]:
    """What the record of a step has in the place of the going rollouts of `groups`, which have
    these numbers in the step. Raises ArtifactError where it has other groups."""
    found, asked, theirs = list[list[Rollout]](), [], []
    for group, number in zip(groups, numbers, strict=True):
        have = sum(not rollout.is_going for rollout in group.rollouts)
        rows = record.filter(pl.col("group") == number)[have : len(group.rollouts)]
        found.append(rollouts_in(rows))
        asked.append((ids[group.prompt_row], len(group.rollouts) - have))
        theirs.append((rows["prompt_id"][0] if len(rows) else None, len(rows)))
    if theirs != asked:
        raise ArtifactError(
            f"step {step}: the record has (prompt, rollouts) {theirs}, and control asks for "
            f"{asked}: it is the record of another run"
        )
    return found


def set_versions(found: Sequence[Sequence[Rollout]], version: int) -> None:
    """Say of all tokens that they are of this version of the policy: which one sampled them follows
    from the steps, and whether a step updated may depend on the machine."""
    for rollout in itertools.chain(*found):
        rollout.versions = [version] * len(rollout.token_ids)


def chosen(
    record: pl.DataFrame, groups: Sequence[Group], ids: pl.Series, step: int
) -> tuple[list[int], list[list[Rollout]]]:
    """The places among `groups` of those that the recorded step took, and their rollouts. Raises
    ArtifactError where it took others."""
    places, found, left = list[int](), list[list[Rollout]](), dict(enumerate(groups))
    for _, rows in record.group_by("group", maintain_order=True):
        prompt_id, size = rows["prompt_id"][0], len(rows)
        place = next(
            (
                place
                for place, group in left.items()
                if (ids[group.prompt_row], len(group.rollouts)) == (prompt_id, size)
            ),
            None,
        )
        if place is None:
            raise ArtifactError(
                f"step {step}: the record has {size} rollouts of {prompt_id}, which are not in "
                "flight: it is the record of another run"
            )
        del left[place]
        places.append(place)
        found.append(rollouts_in(rows))
    return places, found


def check_all(record: pl.DataFrame, groups: Sequence[Group], step: int) -> None:
    """Raise ArtifactError where the record has more rollouts of a step than its groups."""
    num_rollouts = sum(len(group.rollouts) for group in groups)
    if len(record) != num_rollouts:
        raise ArtifactError(
            f"step {step}: the record has {len(record)} rollouts, and control asks for "
            f"{num_rollouts}: it is the record of another run"
        )


def rollouts_in(rows: pl.DataFrame) -> list[Rollout]:
    """Recorded rollouts, not graded yet."""
    columns = rows.select(
        "token_ids", "sampler_logprobs", "versions", "version", "is_action", "finish_reason"
    )
    return [
        Rollout(0, token_ids, logprobs, versions or [version] * len(token_ids), is_action, reason)
        for token_ids, logprobs, versions, version, is_action, reason in columns.rows()
    ]
