"""The profile's rollouts, for methods that read them: they are on-policy at the first step.

`allocate` writes the rollouts of the plan's prompts beside the plan if a method in a slot has
`reads_profile = True` or the warm start reads them; the recipe is then charged for profiling.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from tasks.train.data.columns import Bools, Ints
from tasks.train.data.groups import mixed_groups
from tasks.train.data.prompts import Prompts, rows_of
from tasks.train.data.rollouts import Rollouts, make_rollouts


@dataclass(frozen=True)
class Profile:
    """The SAMPLES of the plan's prompts, in the order of first visits; `prompts` are all training
    prompts. `samples` stays a table until rollouts are requested: lists would not fit in memory."""

    samples: pl.DataFrame
    prompts: Prompts

    @cached_property
    def rows(self) -> Ints:
        """The row of each sample's prompt among the training prompts. Raise ArtifactError for a
        prompt that is not among them."""
        return rows_of(self.samples["prompt_id"], self.prompts.ids, "the profile has samples of")

    def correct(self) -> tuple[Ints, Ints]:
        """Return the numbers of correct and of graded samples of each training prompt, by row; 0
        for prompts outside the plan."""
        num, outcomes = len(self.prompts), self.samples["outcome"].to_numpy()
        graded = np.bincount(self.rows[outcomes != "error"], minlength=num)
        return np.bincount(self.rows[outcomes == "correct"], minlength=num), graded

    def mixed_prompts(self) -> Ints:
        """Return the rows of prompts whose samples have different rewards, in the plan's order."""
        graded = self.samples["outcome"].to_numpy() != "error"
        rewards = self.samples["reward"].to_numpy()[graded]
        mixed = mixed_groups(rewards, self.rows[graded], len(self.prompts))
        visited, first = np.unique(self.rows, return_index=True)
        in_order = visited[np.argsort(first)]
        return in_order[mixed[in_order]]

    def rollouts(self, prompt_rows: Ints) -> Rollouts:
        """Return the graded samples of these prompts, a group per prompt, as replayed rollouts of
        policy version 0. Log-probabilities that were not stored are NaN."""
        group_of = np.full(len(self.prompts), -1)
        group_of[prompt_rows] = np.arange(len(prompt_rows))
        is_used_B: Bools = group_of[self.rows] >= 0
        is_used_B &= self.samples["outcome"].to_numpy() != "error"
        group_B = group_of[self.rows[is_used_B]]
        order = np.argsort(group_B, kind="stable")
        samples = self.samples.filter(pl.Series(is_used_B))[order]
        unknown = pl.lit(float("nan")).repeat_by(pl.col("token_ids").list.len())
        version = pl.lit(0).repeat_by(pl.col("token_ids").list.len())
        return make_rollouts(
            prompt_rows,
            self.prompts.token_ids(prompt_rows),
            group_B[order],
            token_ids=samples["token_ids"],
            logprobs=samples.select(pl.coalesce("logprobs", unknown)).to_series(),
            versions=samples.select(version).to_series(),
            reason=samples["finish_reason"],
            outcome=samples["outcome"],
            reward=samples["reward"],
            replayed=True,
        )
