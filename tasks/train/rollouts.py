"""What a training step works on: the request for it, the rollouts that answer it, and their
micro-batches.

Legend: B rollouts of the step, Q groups (visits), T positions. Groups are ragged: `group_B` says
which group a rollout is of, and no array is reshaped to [-1, G]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.engines.engine import Samples

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ROUNDING = 1e-9  # of the larger reward: what differs by less is equal


@dataclass(frozen=True)
class Prompts:
    """Prompts ready to be sampled and graded, by row of the columns of `table` (PROMPTS).

    They are encoded when they are asked for: the token ids of ten million prompts, as lists, take
    73 GB and a start of an hour."""

    table: pl.DataFrame
    encode: Callable[[pl.DataFrame], list[list[int]]]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def ids(self) -> pl.Series:
        """The prompts' ids."""
        return self.table["prompt_id"]

    def token_ids(self, rows: Ints) -> list[list[int]]:
        """The token ids of the prompts in `rows`. Raises ArtifactError for one that is too long."""
        return self.encode(self.table[rows])


@dataclass(frozen=True)
class GroupRequest:
    """What control asks for: `counts[q]` rollouts of the training prompt in row `prompt_rows[q]`, a
    group each. All of them are of one pass and one phase of the plan."""

    prompt_rows: Ints
    counts: Ints
    pass_number: int
    phase: int


@dataclass(frozen=True)
class Rollouts:
    """B graded rollouts in Q groups, group by group."""

    prompt_rows_Q: Ints
    prompts: list[list[int]]
    group_B: Ints
    samples: Samples
    texts: list[str]
    outcomes: list[str]
    rewards_B: Floats

    def prompt_tokens_B(self) -> Ints:
        """Length of each rollout's prompt."""
        return np.array([len(ids) for ids in self.prompts], dtype=np.int64)[self.group_B]

    def completion_tokens_B(self) -> Ints:
        """Length of each rollout's completion, its stop token counted."""
        return np.array([len(ids) for ids in self.samples.token_ids], dtype=np.int64)

    def tokens_B(self) -> Ints:
        """Tokens of prompt and completion of each rollout."""
        return self.prompt_tokens_B() + self.completion_tokens_B()

    def where(self, keep_B: Bools) -> "Rollouts":
        """The rollouts that `keep_B` marks. Groups keep their numbers, also those left empty."""
        rows = np.flatnonzero(keep_B).tolist()
        if len(rows) == len(keep_B):
            return self
        return Rollouts(
            self.prompt_rows_Q,
            self.prompts,
            self.group_B[keep_B],
            Samples(
                [self.samples.token_ids[row] for row in rows],
                [self.samples.logprobs[row] for row in rows],
                [self.samples.finish_reasons[row] for row in rows],
            ),
            [self.texts[row] for row in rows],
            [self.outcomes[row] for row in rows],
            self.rewards_B[keep_B],
        )

    def is_correct_B(self) -> Bools:
        """Whether a rollout is correct; its reward may say otherwise."""
        return np.array([outcome == "correct" for outcome in self.outcomes], dtype=np.bool_)

    def is_error_B(self) -> Bools:
        """Whether a rollout could not be graded, through our own fault."""
        return np.array([outcome == "error" for outcome in self.outcomes], dtype=np.bool_)


@dataclass(frozen=True)
class StepTotals:
    """What a loss may divide by: sums over the whole step, so that micro-batches add up to it
    whatever their packing.

    They count all graded rollouts, dead groups and those that select dropped among them, or with
    `train.divisor: kept` those that it kept. `max_tokens` is sampling's limit."""

    num_tokens: int
    num_rollouts: int
    max_tokens: int


def merge(parts: Sequence[Rollouts]) -> Rollouts:
    """The rollouts of several requests of one step, groups renumbered one after another."""
    offsets = np.cumsum([0] + [len(part.prompt_rows_Q) for part in parts])
    samples = Samples(
        [ids for part in parts for ids in part.samples.token_ids],
        [logprobs for part in parts for logprobs in part.samples.logprobs],
        [reason for part in parts for reason in part.samples.finish_reasons],
    )
    return Rollouts(
        np.concatenate([part.prompt_rows_Q for part in parts]),
        [ids for part in parts for ids in part.prompts],
        np.concatenate(
            [part.group_B + offset for part, offset in zip(parts, offsets, strict=False)]
        ),
        samples,
        [text for part in parts for text in part.texts],
        [outcome for part in parts for outcome in part.outcomes],
        np.concatenate([part.rewards_B for part in parts]),
    )


def group_means(values_B: Floats, group_B: Ints) -> tuple[Floats, Ints]:
    """[Q] the mean of each group (0 for one without rows) and its size; Q is the largest group
    index and one."""
    size_Q = np.bincount(group_B)
    return np.bincount(group_B, values_B) / np.maximum(size_Q, 1), size_Q


def mixed_groups(rewards_B: Floats, group_B: Ints, num_groups: int) -> Bools:
    """[Q] whether a group has two different rewards.

    Rewards that differ by rounding alone are equal: a composite of 0.1 and 0.2 is not quite 0.3.
    The tolerance is relative, so that small rewards may differ.
    """
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group_B, rewards_B)
    np.maximum.at(high, group_B, rewards_B)
    has_rows = high >= low
    scale = np.maximum(np.abs(low), np.abs(high), out=np.zeros(num_groups), where=has_rows)
    spread = np.subtract(high, low, out=np.zeros(num_groups), where=has_rows)
    return np.asarray(spread > ROUNDING * scale)


def centred_rewards(rewards_B: Floats, group_B: Ints) -> Floats:
    """[B] rewards less their group's mean; exactly 0 in a group whose rewards are all equal, a
    group of one among them."""
    mean_Q, _ = group_means(rewards_B, group_B)
    mixed_Q = mixed_groups(rewards_B, group_B, len(mean_Q))
    return np.where(mixed_Q[group_B], rewards_B - mean_Q[group_B], 0.0)


def keep_in_groups(group_B: Ints, keep: int, choose: Callable[[Ints], Ints]) -> Bools:
    """[B] whether a rollout is kept. `choose(rows)` returns the `keep` places of a group's rows; a
    group of at most `keep` is kept whole."""
    kept_B = np.ones(len(group_B), dtype=np.bool_)
    for group in np.unique(group_B):
        rows = np.flatnonzero(group_B == group)
        if len(rows) > keep:
            kept_B[rows] = False
            kept_B[rows[choose(rows)]] = True
    return kept_B
