"""The profile's rollouts, for methods that read them: on-policy at the first step, and paid for.

`allocate` writes those of the plan's prompts beside the plan, where a method in a slot says
`reads_profile = True`; a recipe that reads them is charged for profiling.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from tasks.common.files import ArtifactError
from tasks.engines.engine import Samples
from tasks.train.rollouts import Bools, Ints, Prompts, Rollouts, mixed_groups


@dataclass(frozen=True)
class Profile:
    """A SAMPLES table of the training prompts `prompts`, in the order in which the plan first
    visits them. It stays a table until rollouts are asked for: as lists they would not fit."""

    samples: pl.DataFrame
    prompts: Prompts

    @cached_property
    def rows(self) -> Ints:
        """Of each sample, the row of its prompt among the training prompts. Raises ArtifactError
        for a prompt that is not among them."""
        row_of = pl.DataFrame({"prompt_id": self.prompts.ids}).with_row_index("row")
        rows = self.samples.select("prompt_id").join(
            row_of, on="prompt_id", how="left", maintain_order="left"
        )
        if unknown := rows.filter(pl.col("row").is_null())["prompt_id"].head(1).to_list():
            raise ArtifactError(
                f"the profile has samples of prompt {unknown[0]}, which is not among the training "
                "prompts: run allocate again"
            )
        return rows["row"].to_numpy().astype(np.int64)

    def correct(self) -> tuple[Ints, Ints]:
        """By row of the training prompts: how many samples are correct, and how many were graded;
        0 where the plan does not visit the prompt."""
        num, outcomes = len(self.prompts), self.samples["outcome"].to_numpy()
        graded = np.bincount(self.rows[outcomes != "error"], minlength=num)
        return np.bincount(self.rows[outcomes == "correct"], minlength=num), graded

    def mixed_prompts(self) -> Ints:
        """The rows of the prompts whose samples have different rewards, in the plan's order."""
        graded = self.samples["outcome"].to_numpy() != "error"
        rewards = self.samples["reward"].to_numpy()[graded]
        mixed = mixed_groups(rewards, self.rows[graded], len(self.prompts))
        visited, first = np.unique(self.rows, return_index=True)
        in_order = visited[np.argsort(first)]
        return in_order[mixed[in_order]]

    def rollouts(self, prompt_rows: Ints) -> Rollouts:
        """The graded samples of these prompts, a group each, as rollouts of policy version 0 that
        are trained on again. Log-probabilities that were not kept are NaN."""
        group_of = np.full(len(self.prompts), -1)
        group_of[prompt_rows] = np.arange(len(prompt_rows))
        wanted: Bools = group_of[self.rows] >= 0
        wanted &= self.samples["outcome"].to_numpy() != "error"
        group_B = group_of[self.rows[wanted]]
        order = np.argsort(group_B, kind="stable")
        chosen = self.samples.filter(pl.Series(wanted))[order]
        token_ids = chosen["token_ids"].to_list()
        logprobs = [
            kept if kept is not None else [float("nan")] * len(ids)
            for kept, ids in zip(chosen["logprobs"].to_list(), token_ids, strict=True)
        ]
        num = len(chosen)
        return Rollouts(
            prompt_rows,
            self.prompts.token_ids(prompt_rows),
            group_B[order],
            Samples(token_ids, logprobs, chosen["finish_reason"].to_list()),
            [""] * num,
            chosen["outcome"].to_list(),
            chosen["reward"].to_numpy(),
            np.zeros(num, dtype=np.int64),
            np.ones(num, dtype=np.bool_),
            [{}] * num,
        )
