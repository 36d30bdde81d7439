"""The rollouts of a training step, with their advantages.

Legend: B rollouts of the step, Q groups (visits), N completion tokens, D hidden size. Groups differ
in size: `group_B` is the group index of each rollout, and no array is [Q, group size]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from tasks.common.accounting.spending import Rows
from tasks.train.data.columns import (
    COLUMNS,
    EMPTY,
    OF_TOKENS,
    OWN_TOKENS,
    Bools,
    Floats,
    Ints,
    Singles,
    column,
    flat,
    lengths_of,
    nested,
    spans,
    with_values,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Features:
    """The features of the policy that a slot reads; a pass over the step's rollouts computes them
    and is charged as scoring.

    Log-probabilities and entropies of all completion tokens come with every such pass.
    `hidden_layer` requests the hidden states of a layer (0 the embeddings, -1 the last), and
    `gradient_norms` the norm of the gradient of each rollout's log-probability, which costs a
    backward pass per rollout.
    """

    hidden_layer: int | None = None
    gradient_norms: bool = False

    @property
    def reads_whole_rows(self) -> bool:
        """Whether the pass computes prompts again for each rollout, instead of once per group."""
        return self.hidden_layer is not None or self.gradient_norms


@dataclass(frozen=True)
class Observed:
    """The policy's view of B rollouts with N completion tokens in total, before the step's update:
    [N] log-probabilities and entropies; if requested, the hidden states [N, D] that predict the
    completion, the mean hidden states [B, D] of the last prompt tokens, and [B] gradient norms."""

    logprobs_N: Floats
    entropies_N: Floats
    hidden_ND: Singles | None = None
    prompt_hidden_BD: Singles | None = None
    gradient_norms_B: Floats | None = None

    def take(self, rows: Ints, places: Ints) -> "Observed":
        """Return the features of the rollouts at `rows`, whose tokens are at `places`."""
        return Observed(
            self.logprobs_N[places],
            self.entropies_N[places],
            None if self.hidden_ND is None else self.hidden_ND[places],
            None if self.prompt_hidden_BD is None else self.prompt_hidden_BD[rows],
            None if self.gradient_norms_B is None else self.gradient_norms_B[rows],
        )


def once(method: Callable[[Any], T]) -> Callable[[Any], T]:
    """Cache the result of a method of an immutable object at its first call."""

    @wraps(method)
    def get(self: Any) -> T:
        key = f"_{method.__name__}"
        if key not in self.__dict__:
            self.__dict__[key] = method(self)
        found: T = self.__dict__[key]
        return found

    return get


@dataclass(frozen=True)
class Rollouts:
    """B rollouts in Q groups, group by group, with N completion tokens in total. `table` has one
    row per rollout (see COLUMNS). An engine's samples extend the rows, the grader fills in their
    verdicts, checkpoints and replay store the table, the record adds columns, and the learner reads
    columns as arrays.

    Values of tokens are in flat arrays [N], rollout after rollout (see `places`). `prompt_rows_Q`
    has an entry for every group, including groups that `take` left empty. With several epochs, the
    reference's log-probabilities are computed once, as `reference_N`."""

    table: pl.DataFrame
    prompt_rows_Q: Ints
    observed: Observed | None = None
    reference_N: Floats | None = None

    @classmethod
    def of(cls, table: pl.DataFrame) -> "Rollouts":
        """Return the rollouts of a table whose groups are numbered from 0 without gaps."""
        _, first_Q = np.unique(table["group"].to_numpy(), return_index=True)
        return cls(table, table["prompt_row"].to_numpy()[first_Q])

    @cached_property
    def group_B(self) -> Ints:
        return self.table["group"].to_numpy()

    @cached_property
    def rewards_B(self) -> Floats:
        return self.table["reward"].to_numpy()

    @cached_property
    def replayed_B(self) -> Bools:
        return self.table["replayed"].to_numpy()

    @cached_property
    def versions_B(self) -> Ints:
        """The policy version (number of updates) of the oldest token of each rollout; -1 for a
        rollout without a token."""
        return self.table["versions"].list.min().fill_null(-1).to_numpy()

    @cached_property
    def logprobs_N(self) -> Floats:
        return flat(self.table["logprobs"])

    @once
    def prompt_tokens_B(self) -> Ints:
        return lengths_of(self.table["prompt"])

    @once
    def completion_tokens_B(self) -> Ints:
        """Return the length of each rollout's completion, including its stop token."""
        return lengths_of(self.table["token_ids"])

    @once
    def tokens_B(self) -> Ints:
        """Return the number of tokens of prompt and completion of each rollout."""
        return self.prompt_tokens_B() + self.completion_tokens_B()

    def rows(self, chosen_B: Bools | slice = slice(None)) -> Rows:
        """Return the groups and lengths of all rollouts, or of the rollouts that `chosen_B`
        marks."""
        arrays = self.group_B, self.prompt_tokens_B(), self.completion_tokens_B()
        return Rows(*(array[chosen_B] for array in arrays))

    @once
    def owner_N(self) -> Ints:
        """Return [N] the rollout's index for each completion token."""
        return np.repeat(np.arange(len(self.group_B)), self.completion_tokens_B())

    def places(self, rows: Ints) -> Ints:
        """Return the indices into flat arrays [N] of the completion tokens of `rows`, in order."""
        lengths = self.completion_tokens_B()
        return spans((np.cumsum(lengths) - lengths)[rows], lengths[rows])

    @once
    def trained_N(self) -> Bools:
        """Return [N] whether a token is the policy's own, not an environment's."""
        if self.table["is_action"].null_count() == len(self.table):
            return np.ones(int(self.completion_tokens_B().sum()), dtype=np.bool_)
        return flat(self.table.select(OWN_TOKENS).to_series())

    @once
    def versions_N(self) -> Ints:
        """Return [N] the version of the policy that each token was sampled from."""
        return flat(self.table["versions"])

    def is_current_N(self, version: int) -> Bools:
        """Return [N] whether a token is in a fresh rollout whose oldest token is of `version`."""
        is_current_B = (self.versions_B == version) & ~self.replayed_B
        return np.asarray(is_current_B[self.owner_N()])

    def take(self, rows: Ints) -> "Rollouts":
        """Return the rollouts at `rows`, in that order; even empty groups keep their numbers."""
        taken = Rollouts(self.table[rows], self.prompt_rows_Q)
        if self.observed is not None:
            taken = replace(taken, observed=self.observed.take(rows, self.places(rows)))
        if self.reference_N is not None:
            taken = replace(taken, reference_N=self.reference_N[self.places(rows)])
        return taken

    def where(self, keep_B: Bools) -> "Rollouts":
        return self if keep_B.all() else self.take(np.flatnonzero(keep_B))

    def groups(self, numbers: Ints) -> "Rollouts":
        """Return the rollouts of these groups in this order, with groups renumbered from 0."""
        place_of = np.full(len(self.prompt_rows_Q), -1)
        place_of[numbers] = np.arange(len(numbers))
        kept = self.with_columns(group=place_of[self.group_B]).table
        table = kept.filter(pl.col("group") >= 0).sort("group", maintain_order=True)
        return Rollouts(table, self.prompt_rows_Q[numbers])

    def sizes_Q(self) -> Ints:
        return np.bincount(self.group_B, minlength=len(self.prompt_rows_Q))

    def graded_Q(self) -> tuple[Ints, Ints]:
        """Return [Q] the numbers of graded and of correct rollouts of each group."""
        num_groups, is_error_B = len(self.prompt_rows_Q), self.is_error_B()
        return (
            np.bincount(self.group_B[~is_error_B], minlength=num_groups),
            np.bincount(self.group_B[self.is_correct_B()], minlength=num_groups),
        )

    def with_columns(self, **values: Any) -> "Rollouts":
        """Return the rollouts with new values in some columns: a list, an array or one value."""
        return replace(self, table=with_values(self.table, values))

    def estimated(self, keep_B: Bools, advantages_N: Floats) -> "Rollouts":
        """Return the rollouts with their part in the update: whether they enter the loss, and the
        advantages of their tokens."""
        advantages = nested(advantages_N, self.completion_tokens_B())
        return self.with_columns(kept=keep_B, advantages=advantages)

    @cached_property
    def kept_B(self) -> Bools:
        return self.table["kept"].to_numpy()

    @cached_property
    def advantages_N(self) -> Floats:
        return flat(self.table["advantages"])

    @cached_property
    def old_logprobs_N(self) -> Floats | None:
        old = self.table["old_logprobs"]
        return None if old.null_count() else flat(old)

    @once
    def has_advantage_B(self) -> Bools:
        """Return [B] whether any token of a rollout has an advantage other than 0."""
        return np.bincount(self.owner_N(), self.advantages_N != 0.0, len(self.group_B)) > 0

    def without_tails(self) -> "Rollouts":
        """Return the rollouts up to their last token of nonzero advantage, at least one token."""
        ends_B, weighs = np.ones(len(self.group_B), dtype=np.int64), self.advantages_N != 0.0
        starts_B = np.cumsum(self.completion_tokens_B()) - self.completion_tokens_B()
        owner_N = self.owner_N()[weighs]
        np.maximum.at(ends_B, owner_N, np.flatnonzero(weighs) - starts_B[owner_N] + 1)
        columns = [pl.col(name).list.head(pl.lit(pl.Series(ends_B))) for name in OF_TOKENS]
        return Rollouts(self.table.with_columns(columns), self.prompt_rows_Q)

    def own_means_B(self, values_N: Floats) -> Floats:
        """Return [B] the mean of `values_N` over each rollout's own tokens; 0 without any."""
        owner_N, trained_N, num = self.owner_N(), self.trained_N(), len(self.group_B)
        length_B = np.bincount(owner_N, trained_N, num)
        sum_B = np.bincount(owner_N, values_N * trained_N, num)
        return np.asarray(sum_B / np.maximum(length_B, 1))

    @once
    def is_correct_B(self) -> Bools:
        """Return [B] whether a rollout's outcome is `correct`, whatever its reward."""
        return (self.table["outcome"] == "correct").to_numpy()

    @once
    def is_cut_B(self) -> Bools:
        """Return [B] whether a completion was cut at the token limit."""
        return (self.table["reason"] == "length").to_numpy()

    @once
    def is_error_B(self) -> Bools:
        """Return [B] whether a rollout could not be graded because of an internal error."""
        return (self.table["outcome"] == "error").to_numpy()


def make_rollouts(
    prompt_rows_Q: Ints, prompts: Sequence[Sequence[int]], group_B: Ints, **values: Any
) -> Rollouts:
    """Return rollouts in the groups `group_B`; the groups' prompts have these rows and token ids.
    `values` sets columns; all others are as in EMPTY, and lists of tokens are empty."""
    prompt_B = column("prompt", prompts)[group_B]
    table = pl.DataFrame(
        {"group": group_B, "prompt_row": prompt_rows_Q[group_B], "prompt": prompt_B}
    )
    nothing: list[list[int]] = [[]] * len(group_B)
    no_tokens = dict.fromkeys(("token_ids", "logprobs", "versions"), nothing)
    table = with_values(table, {**EMPTY, **no_tokens, **values})
    return Rollouts(table[[*COLUMNS]], prompt_rows_Q)


@dataclass(frozen=True)
class StepTotals:
    """The divisors of a loss: sums over the whole step, so that the losses of micro-batches add up,
    however they are packed.

    They count all graded rollouts, including groups with equal rewards and rollouts that `select`
    dropped. With `train.divisor: kept` they count only the kept rollouts. Only the policy's own
    tokens count. `max_tokens` is the limit of a completion. `divisor_Q` is each group's number of
    tokens times the number of groups with tokens, on the policy's device."""

    num_tokens: int
    num_rollouts: int
    max_tokens: int
    divisor_Q: "torch.Tensor | None" = None


def merge(parts: Sequence[Rollouts]) -> Rollouts:
    """Return the rollouts of all parts, part after part, with disjoint groups."""
    firsts = np.cumsum([0] + [len(part.prompt_rows_Q) for part in parts]).tolist()
    tables = [
        part.table.with_columns(pl.col("group") + first)
        for first, part in zip(firsts, parts, strict=False)
    ]
    rows_Q = np.concatenate([part.prompt_rows_Q for part in parts])
    return Rollouts(pl.concat(tables, rechunk=True), rows_Q)
