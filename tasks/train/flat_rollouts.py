"""Rollouts as flat arrays, so that a checkpoint can hold them.

Legend: G groups, B rollouts, N completion tokens, P prompt tokens.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tasks.common.artifacts import OUTCOMES
from tasks.engines.engine import Samples
from tasks.train.rollouts import Floats, Ints, Rollouts, flat, mixed_versions, ragged, spans
from tasks.train.settings import BatchSettings

REASONS = ("stop", "length")


@dataclass
class FlatRollouts:
    """Groups in the order in which they came: the prompt's row, its length and the number of
    rollouts of each; of each rollout its length, reward, outcome, finish reason and the version of
    its policy; and the tokens, with the sampler's log-probabilities, whether they are the policy's
    own, and the version behind each."""

    prompt_rows_G: Ints
    prompt_lengths_G: Ints
    sizes_G: Ints
    lengths_B: Ints
    rewards_B: Floats
    outcomes_B: Ints
    reasons_B: Ints
    versions_B: Ints
    prompt_tokens_P: Ints
    tokens_N: Ints
    logprobs_N: Floats
    own_N: Ints
    versions_N: Ints

    @classmethod
    def empty(cls) -> "FlatRollouts":
        kinds: dict[str, Any] = {"rewards_B": float, "logprobs_N": float}
        return cls(**{f.name: np.zeros(0, kinds.get(f.name, np.int64)) for f in fields(cls)})

    @classmethod
    def of(cls, rollouts: Rollouts) -> "FlatRollouts":
        """The groups of `rollouts` that have any."""
        groups, sizes = np.unique(rollouts.group_B, return_counts=True)
        prompts = [rollouts.prompts[group] for group in groups]
        samples = rollouts.samples
        return cls(
            rollouts.prompt_rows_Q[groups],
            np.array([len(ids) for ids in prompts], dtype=np.int64),
            sizes.astype(np.int64),
            rollouts.completion_tokens_B(),
            rollouts.rewards_B.copy(),
            np.array([OUTCOMES.index(outcome) for outcome in rollouts.outcomes], dtype=np.int64),
            np.array([REASONS.index(reason) for reason in samples.finish_reasons], dtype=np.int64),
            rollouts.versions_B.copy(),
            flat(prompts, np.int64),
            flat(samples.token_ids, np.int64),
            flat(samples.logprobs, np.float64),
            rollouts.trained_N().astype(np.int64),
            rollouts.token_versions_N(),
        )

    def cost_G(self, batch: BatchSettings) -> Ints:
        """What each group counts for, in the batch's unit."""
        return self.sizes_G if batch.unit == "rollouts" else np.ones_like(self.sizes_G)

    def join(self, other: "FlatRollouts") -> "FlatRollouts":
        """These groups, then the other ones."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return FlatRollouts(*(np.concatenate(pair) for pair in pairs))

    def take(self, groups: Ints) -> "FlatRollouts":
        """The groups at these places, in that order."""
        rows = spans(self.sizes_G, groups)
        places = {
            "G": groups,
            "B": rows,
            "P": spans(self.prompt_lengths_G, groups),
            "N": spans(self.lengths_B, rows),
        }
        return FlatRollouts(*(getattr(self, f.name)[places[f.name[-1]]] for f in fields(self)))

    def rollouts(self) -> Rollouts:
        """All of them, as replayed rollouts. Their texts are not kept."""
        num = len(self.lengths_B)
        return Rollouts(
            self.prompt_rows_G,
            ragged(self.prompt_tokens_P, self.prompt_lengths_G),
            np.repeat(np.arange(len(self.sizes_G)), self.sizes_G),
            Samples(
                ragged(self.tokens_N, self.lengths_B),
                ragged(self.logprobs_N, self.lengths_B),
                [REASONS[reason] for reason in self.reasons_B],
            ),
            [""] * num,
            [OUTCOMES[outcome] for outcome in self.outcomes_B],
            self.rewards_B,
            self.versions_B,
            np.ones(num, dtype=np.bool_),
            [{}] * num,
            None if self.own_N.all() else self.own_N > 0,
            versions_N=mixed_versions(self.versions_B, self.versions_N, self.lengths_B),
        )
