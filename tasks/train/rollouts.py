"""What a training step works on: the request for it, the rollouts that answer it, and their
micro-batches.

Legend: B rollouts of the step, Q groups (visits), T positions. Groups are ragged: `group_B` says
which group a rollout is of, and no array is reshaped to [-1, G]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.spending import Rows
from tasks.engines.engine import Samples
from tasks.engines.settings import Sampling

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

ROUNDING = 1e-9  # of the larger reward: what differs by less is equal


@dataclass(frozen=True)
class Prompts:
    """Prompts ready to be sampled and graded, by row of the columns of `table` (PROMPTS).

    They are encoded when they are asked for: as lists, the token ids of ten million prompts take
    tens of gigabytes, and hours to make."""

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
    group each. All of them are of one pass and one phase of the plan.

    `extends[q]` is the number of the step's group that they join, -1 for a group of their own; None
    where all are new. `sampling` replaces the run's settings: the weights of the loss correct for
    the difference, as for any sampler. `prefixes[q]` are token ids that follow the prompt, such as
    the start of a solution; they are part of the prompt, and not trained on.
    """

    prompt_rows: Ints
    counts: Ints
    pass_number: int
    phase: int
    extends: Ints | None = None
    sampling: Sampling | None = None
    prefixes: list[list[int]] | None = None

    def groups(self, first_new: int) -> Ints:
        """[Q] each group's number in the step, of which `first_new` is the next free one."""
        if self.extends is None:
            return np.arange(first_new, first_new + len(self.counts))
        is_new = self.extends < 0
        return np.where(is_new, first_new + np.cumsum(is_new) - 1, self.extends)


@dataclass(frozen=True)
class Features:
    """What a slot wants to see of the policy before it decides; a pass over the step's rollouts
    supplies it and is charged as scoring.

    Log-probabilities and entropies of all completion tokens come with every such pass.
    `hidden_layer` asks for the hidden states of a layer (0 the embeddings, -1 the last) and
    `gradient_norms` for the norm of the gradient of each rollout's log-probability, which costs a
    backward pass a rollout.
    """

    hidden_layer: int | None = None
    gradient_norms: bool = False


@dataclass(frozen=True)
class Observed:
    """The policy's view of B rollouts with N completion tokens in all, before the step's update:
    [N] log-probabilities and entropies; where asked for the hidden states [N, D] that predict the
    completion's tokens, and those of the last prompt tokens' mean [B, D]; [B] gradient norms."""

    logprobs_N: Floats
    entropies_N: Floats
    hidden_ND: Singles | None = None
    prompt_hidden_BD: Singles | None = None
    gradient_norms_B: Floats | None = None

    def take(self, rows: Ints, places: Ints) -> "Observed":
        """What was seen of the rollouts `rows`, whose tokens stand at `places`."""
        return Observed(
            self.logprobs_N[places],
            self.entropies_N[places],
            None if self.hidden_ND is None else self.hidden_ND[places],
            None if self.prompt_hidden_BD is None else self.prompt_hidden_BD[rows],
            None if self.gradient_norms_B is None else self.gradient_norms_B[rows],
        )


@dataclass(frozen=True)
class Rollouts:
    """B graded rollouts in Q groups, group by group, with N completion tokens in all.

    What is known of a token stands in flat arrays [N], rollout after rollout (see `places`).
    `versions_B` counts the updates of the policy that a rollout was sampled from; what was
    `replayed_B` comes from an earlier step. `scores` are the parts of a composite reward by name.
    `is_action_N` is False for tokens that an environment or a tool wrote: they are never trained
    on; None: all are the policy's. A version of -1 says that other sampling settings than the
    run's were asked for. Where weights were swapped in the middle of a rollout, `versions_N` has
    those of its tokens, and `versions_B` the oldest of them; None: all tokens of each are of one.
    """

    prompt_rows_Q: Ints
    prompts: list[list[int]]
    group_B: Ints
    samples: Samples
    texts: list[str]
    outcomes: list[str]
    rewards_B: Floats
    versions_B: Ints
    replayed_B: Bools
    scores: list[dict[str, float]]
    is_action_N: Bools | None = None
    observed: Observed | None = None
    versions_N: Ints | None = None

    def prompt_tokens_B(self) -> Ints:
        """Length of each rollout's prompt."""
        return np.array([len(ids) for ids in self.prompts], dtype=np.int64)[self.group_B]

    def completion_tokens_B(self) -> Ints:
        """Length of each rollout's completion, its stop token counted."""
        return np.array([len(ids) for ids in self.samples.token_ids], dtype=np.int64)

    def tokens_B(self) -> Ints:
        """Tokens of prompt and completion of each rollout."""
        return self.prompt_tokens_B() + self.completion_tokens_B()

    def rows(self) -> Rows:
        """The rollouts by length."""
        return Rows(self.group_B, self.prompt_tokens_B(), self.completion_tokens_B())

    def owner_N(self) -> Ints:
        """[N] the rollout of each completion token."""
        return np.repeat(np.arange(len(self.group_B)), self.completion_tokens_B())

    def places(self, rows: Ints) -> Ints:
        """The places in flat arrays [N] of the completion tokens of `rows`, row after row."""
        return spans(self.completion_tokens_B(), rows)

    def trained_N(self) -> Bools:
        """[N] whether a token is the policy's own."""
        if self.is_action_N is not None:
            return self.is_action_N
        return np.ones(int(self.completion_tokens_B().sum()), dtype=np.bool_)

    def token_versions_N(self) -> Ints:
        """[N] the version of the policy that each token was sampled from."""
        return self.versions_B[self.owner_N()] if self.versions_N is None else self.versions_N

    def is_current_N(self, version: int) -> Bools:
        """[N] whether a token was sampled for this step from this version of the policy, with the
        run's settings."""
        is_current_B = (self.versions_B == version) & ~self.replayed_B
        return np.asarray(is_current_B[self.owner_N()])

    def take(self, rows: Ints) -> "Rollouts":
        """The rollouts `rows`, in that order. Groups keep their numbers, also those left empty."""
        chosen, places = rows.tolist(), self.places(rows)
        return replace(
            self,
            group_B=self.group_B[rows],
            samples=Samples(
                [self.samples.token_ids[row] for row in chosen],
                [self.samples.logprobs[row] for row in chosen],
                [self.samples.finish_reasons[row] for row in chosen],
            ),
            texts=[self.texts[row] for row in chosen],
            outcomes=[self.outcomes[row] for row in chosen],
            rewards_B=self.rewards_B[rows],
            versions_B=self.versions_B[rows],
            replayed_B=self.replayed_B[rows],
            scores=[self.scores[row] for row in chosen],
            is_action_N=None if self.is_action_N is None else self.is_action_N[places],
            versions_N=None if self.versions_N is None else self.versions_N[places],
            observed=None if self.observed is None else self.observed.take(rows, places),
        )

    def where(self, keep_B: Bools) -> "Rollouts":
        """The rollouts that `keep_B` marks."""
        return self if keep_B.all() else self.take(np.flatnonzero(keep_B))

    def is_correct_B(self) -> Bools:
        """Whether a rollout is correct; its reward may say otherwise."""
        return np.array([outcome == "correct" for outcome in self.outcomes], dtype=np.bool_)

    def is_error_B(self) -> Bools:
        """Whether a rollout could not be graded, through our own fault."""
        return np.array([outcome == "error" for outcome in self.outcomes], dtype=np.bool_)


@dataclass(frozen=True)
class Estimate:
    """What is learned from B rollouts with N completion tokens: which of them enter the loss, and
    the advantages of their tokens, 0 for those of the others and of an environment. `old_N` are the
    log-probabilities before the batch's first update, None where there is but one."""

    keep_B: Bools
    advantages_N: Floats
    old_N: Floats | None

    def has_advantage_B(self, rollouts: Rollouts) -> Bools:
        """[B] whether a token of the rollout has an advantage that is not 0."""
        found: Bools = np.zeros(len(self.keep_B), dtype=np.bool_)
        np.logical_or.at(found, rollouts.owner_N(), self.advantages_N != 0.0)
        return found

    def mean_B(self, rollouts: Rollouts) -> Floats:
        """[B] the mean advantage of each rollout's own tokens."""
        owner_N, trained_N, num = rollouts.owner_N(), rollouts.trained_N(), len(self.keep_B)
        length_B = np.bincount(owner_N, trained_N, num)
        return np.asarray(np.bincount(owner_N, self.advantages_N, num) / np.maximum(length_B, 1))

    def take(self, rollouts: Rollouts, rows: Ints) -> "Estimate":
        """The estimate for `rows` of `rollouts` alone."""
        places = rollouts.places(rows)
        old_N = None if self.old_N is None else self.old_N[places]
        return Estimate(self.keep_B[rows], self.advantages_N[places], old_N)


@dataclass(frozen=True)
class StepTotals:
    """What a loss may divide by: sums over the whole step, so that micro-batches add up to it
    whatever their packing.

    They count all graded rollouts, dead groups and those that select dropped among them, or with
    `train.divisor: kept` those that it kept; and of their tokens the policy's own. `max_tokens` is
    sampling's limit."""

    num_tokens: int
    num_rollouts: int
    max_tokens: int


def merge(parts: Sequence[Rollouts]) -> Rollouts:
    """The rollouts of all parts, whose groups are different ones, part after part."""
    firsts = np.cumsum([0] + [len(part.prompt_rows_Q) for part in parts])
    samples = Samples(
        [ids for part in parts for ids in part.samples.token_ids],
        [logprobs for part in parts for logprobs in part.samples.logprobs],
        [reason for part in parts for reason in part.samples.finish_reasons],
    )
    masked = any(part.is_action_N is not None for part in parts)
    swapped = any(part.versions_N is not None for part in parts)
    return Rollouts(
        np.concatenate([part.prompt_rows_Q for part in parts]),
        [ids for part in parts for ids in part.prompts],
        np.concatenate([first + part.group_B for first, part in zip(firsts, parts, strict=False)]),
        samples,
        [text for part in parts for text in part.texts],
        [outcome for part in parts for outcome in part.outcomes],
        np.concatenate([part.rewards_B for part in parts]),
        np.concatenate([part.versions_B for part in parts]),
        np.concatenate([part.replayed_B for part in parts]),
        [scores for part in parts for scores in part.scores],
        np.concatenate([part.trained_N() for part in parts]) if masked else None,
        versions_N=np.concatenate([part.token_versions_N() for part in parts]) if swapped else None,
    )


def spans(lengths: Ints, chosen: Ints) -> Ints:
    """The places, in a flat array of parts of these lengths, of the chosen parts."""
    starts, wanted = np.cumsum(lengths) - lengths, lengths[chosen]
    before = np.cumsum(wanted) - wanted
    return np.asarray(np.arange(wanted.sum()) + np.repeat(starts[chosen] - before, wanted))


def flat(rows: "list[list[int]] | list[list[float]]", dtype: type) -> "np.ndarray":
    """The rows one after another."""
    return np.array([value for row in rows for value in row], dtype=dtype)


def ragged(values: "np.ndarray", lengths: Ints) -> list[Any]:
    """The inverse of `flat`."""
    if not len(lengths):
        return []
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]


def mixed_versions(versions_B: Ints, versions_N: Ints, lengths_B: Ints) -> Ints | None:
    """[N] the versions of tokens as `Rollouts` has them: None where all tokens of each rollout are
    of its own."""
    return None if (versions_N == np.repeat(versions_B, lengths_B)).all() else versions_N


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
