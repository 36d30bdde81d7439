"""Prompts ready for sampling, and the control's request for rollouts of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.common.files import ArtifactError
from tasks.train.data.columns import Bools, Ints


@dataclass(frozen=True)
class Prompts:
    """Prompts ready for sampling and grading, one per row of `table` (PROMPTS).

    They are encoded on request: as lists, the token ids of ten million prompts take tens of
    gigabytes, and hours to compute."""

    table: pl.DataFrame
    encode: Callable[[pl.DataFrame], list[list[int]]]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def ids(self) -> pl.Series:
        return self.table["prompt_id"]

    def token_ids(self, rows: Ints) -> list[list[int]]:
        """Return the token ids of the prompts in `rows`. Raise ArtifactError if one is too long."""
        return self.encode(self.table[rows])


def rows_of(prompt_ids: pl.Series, known: pl.Series, whose: str) -> Ints:
    """Return the rows of prompts among the `known` training prompts. Raise ArtifactError for any
    other prompt; its message begins with `whose`."""
    row_of = pl.DataFrame({"prompt_id": known}).with_row_index("row")
    rows = pl.DataFrame({"prompt_id": prompt_ids}).join(
        row_of, on="prompt_id", how="left", maintain_order="left"
    )
    if unknown := rows.filter(pl.col("row").is_null())["prompt_id"].sort().head(1).to_list():
        raise ArtifactError(
            f"{whose} prompt {unknown[0]}, which is not among the training prompts: run allocate "
            "again"
        )
    return rows["row"].to_numpy().astype(np.int64)


@dataclass(frozen=True)
class GroupRequest:
    """A request by the control: for each group q, `counts[q]` rollouts of the training prompt in
    row `prompt_rows[q]`. All groups belong to one pass and one phase of the plan.

    `extends[q]` is the index, in the step, of the group that the rollouts join, or -1 for a new
    group; `extends` is None if all are new. `joined[q]` is whether a stored rollout joins the group
    (`Replay.join`); `joined` is None if none does.
    """

    prompt_rows: Ints
    counts: Ints
    pass_number: int
    phase: int
    extends: Ints | None = None
    joined: Bools | None = None

    def groups(self, first_new: int) -> Ints:
        """Return [Q] each group's number in the step; `first_new` is the next free number."""
        if self.extends is None:
            return np.arange(first_new, first_new + len(self.counts))
        is_new = self.extends < 0
        return np.where(is_new, first_new + np.cumsum(is_new) - 1, self.extends)
