"""`successes`: a stored success joins a fresh group of its prompt (ExGRPO, arXiv 2510.02245). Use
with `control: experience`, which chooses the groups.

The correct rollouts of partly solved groups are stored, the latest `per_prompt` of every prompt,
with the sampler's log-probabilities, until the prompt has an all-correct group. Of these rollouts,
the one with the least mean entropy under the present policy joins the prompt's group. Finding it
takes a pass over them, charged as scoring, unless no prompt has two. The `capacity` prompts with
the latest successes are kept."""

import numpy as np
import polars as pl

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.methods.replay.kept import State, to_table
from tasks.train.slots import Replay, Score

stored_candidates = "per_prompt"


@settings
class Settings:
    per_prompt: int = 8  # stored successes per prompt
    capacity: int = 4096  # maximum number of prompts

    def __post_init__(self) -> None:
        at_least(
            1, train__replay__per_prompt=self.per_prompt, train__replay__capacity=self.capacity
        )


class Method(Replay):
    joins = True

    def __init__(self, settings: Settings) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        self.settings = settings
        self.state = State(to_table(make_rollouts(nothing, [], nothing)))

    def add(self, rollouts: Rollouts) -> None:
        """Store the successes of partly solved groups."""
        size_Q, correct_Q = rollouts.graded_Q()
        is_solved_Q = (correct_Q == size_Q) & (size_Q > 0)
        fresh = rollouts.where(rollouts.is_correct_B() & ~is_solved_Q[rollouts.group_B])
        solved = pl.Series(rollouts.prompt_rows_Q[is_solved_Q])
        left = self.state.table.filter(~pl.col("prompt_row").is_in(solved.implode()))
        age = pl.int_range(pl.len()).reverse().over("prompt_row")
        joined = pl.concat([left, to_table(fresh)]).filter(age < self.settings.per_prompt)
        latest = joined["prompt_row"].reverse().unique(maintain_order=True)
        kept = latest.head(self.settings.capacity).implode()
        self.state = State(joined.filter(pl.col("prompt_row").is_in(kept)).rechunk())

    def join(self, prompt_rows_Q: Ints, score: Score) -> Rollouts:
        """Return, for each prompt with stored successes, the one with the least entropy."""
        wanted = pl.DataFrame({"prompt_row": prompt_rows_Q}).with_row_index("place")
        found = self.state.table.join(wanted, on="prompt_row", maintain_order="left")
        group = pl.col("place").cast(pl.Int64).alias("group")
        table = found.with_columns(group).drop("place").sort("group", maintain_order=True)
        candidates = Rollouts(table, prompt_rows_Q)
        group_B = candidates.group_B
        if (candidates.sizes_Q() < 2).all():
            return candidates
        entropy_B = candidates.own_means_B(score(candidates).entropies_N)
        order = np.lexsort((entropy_B, group_B))
        _, first = np.unique(group_B, return_index=True)
        return candidates.take(order[first])
