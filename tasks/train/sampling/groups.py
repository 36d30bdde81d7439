"""Groups of rollouts as they are sampled: what an engine is asked for, what a step learns from, and
the table that a checkpoint keeps of them.

Legend: B rollouts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from tasks.engines.engine import Request, Samples
from tasks.engines.settings import Sampling
from tasks.grading.verdict import Verdict
from tasks.train.rollouts import Ints, Rollouts, mixed_versions

GOING = "abort"  # the finish reason of what has not ended: engines give it to what was stopped
INTS, FLOATS = pl.List(pl.Int64), pl.List(pl.Float64)
COLUMNS: dict[str, Any] = {
    "batch": pl.Int64,
    "group": pl.Int64,
    "prompt_row": pl.Int64,
    "prompt": INTS,
    "since": pl.Int64,
    "seed": pl.Int64,
    "token_ids": INTS,
    "logprobs": FLOATS,
    "versions": INTS,
    "is_action": pl.List(pl.Boolean),
    "reason": pl.String,
    "text": pl.String,
    "outcome": pl.String,
    "reward": pl.Float64,
    "scores": pl.String,
}


@dataclass
class Rollout:
    """A completion as far as it is written, with the version of the policy behind each token, -1
    for other sampling settings than the run's; once it has ended its text and verdict. For example
    Rollout(seed=81, token_ids=[40, 2], logprobs=[-0.2, -0.1], versions=[6, 7], reason="stop",
    text="7", outcome="correct", reward=1.0)."""

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_action: list[bool] | None = None
    reason: str = GOING
    text: str = ""
    outcome: str = ""
    reward: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def is_going(self) -> bool:
        """Whether it has not ended."""
        return self.reason == GOING

    def copy(self) -> "Rollout":
        """Another rollout that goes on from the same tokens."""
        return replace(
            self,
            token_ids=[*self.token_ids],
            logprobs=[*self.logprobs],
            versions=[*self.versions],
        )

    def grade(self, text: str, verdict: Verdict) -> None:
        """Take the verdict on its text."""
        self.text, self.outcome = text, verdict.outcome
        self.reward, self.scores = verdict.reward, dict(verdict.parts)


@dataclass
class Group:
    """The rollouts of one prompt, which stands in row `prompt_row` of the training prompts;
    `prompt` are its token ids, those of a prefix among them. `since` is the step in which it was in
    flight first, -1 before that. For example Group(12, [5, 9, 4], [Rollout(...), Rollout(...)])."""

    prompt_row: int
    prompt: list[int]
    rollouts: list[Rollout] = field(default_factory=list)
    since: int = -1

    def copy(self) -> "Group":
        """Another group with rollouts of its own; those that have ended are shared."""
        rollouts = [rollout.copy() if rollout.is_going else rollout for rollout in self.rollouts]
        return replace(self, rollouts=rollouts)

    @property
    def is_complete(self) -> bool:
        """Whether all its rollouts have ended."""
        return not any(rollout.is_going for rollout in self.rollouts)


def request_for(groups: Sequence[Group], sampling: Sampling) -> tuple[Request, list[Rollout], Ints]:
    """The request for all that is not written yet, the rollout of each completion, and the place
    among `groups` of each prompt of the request. Rollouts that have begun are asked for one by one,
    with what they have as a part of the prompt; the others of a group share its prefill."""
    prompts, counts, written = list[list[int]](), list[int](), list[int]()
    rollouts, places = list[Rollout](), list[int]()
    for place, group in enumerate(groups):
        going = [rollout for rollout in group.rollouts if rollout.is_going]
        begun = [rollout for rollout in going if rollout.token_ids]
        parts = [[rollout] for rollout in begun]
        if len(begun) < len(going):
            parts.append([rollout for rollout in going if not rollout.token_ids])
        for part in parts:
            prompts.append([*group.prompt, *part[0].token_ids])
            counts.append(len(part))
            written.append(len(part[0].token_ids))
            rollouts += part
            places.append(place)
    seeds = [rollout.seed for rollout in rollouts]
    request = Request(prompts, counts, seeds, sampling, written=written if any(written) else None)
    return request, rollouts, np.array(places, dtype=np.int64)


def samples_of(rollouts: Sequence[Rollout]) -> Samples:
    """Rollouts as an engine gives them."""
    masked = any(rollout.is_action is not None for rollout in rollouts)
    return Samples(
        [rollout.token_ids for rollout in rollouts],
        [rollout.logprobs for rollout in rollouts],
        [rollout.reason for rollout in rollouts],
        [r.is_action or [True] * len(r.token_ids) for r in rollouts] if masked else None,
        [rollout.versions for rollout in rollouts],
    )


def rollouts_of(groups: Sequence[Group]) -> Rollouts:
    """Complete groups as a step's fresh rollouts."""
    every = [rollout for group in groups for rollout in group.rollouts]
    samples = samples_of(every)
    versions_B = np.array([min(each, default=-1) for each in samples.versions or []], np.int64)
    versions_N = np.array([v for each in samples.versions or [] for v in each], np.int64)
    lengths_B = np.array([len(ids) for ids in samples.token_ids], dtype=np.int64)
    return Rollouts(
        np.array([group.prompt_row for group in groups], dtype=np.int64),
        [group.prompt for group in groups],
        np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups]),
        Samples(samples.token_ids, samples.logprobs, samples.finish_reasons),
        [rollout.text for rollout in every],
        [rollout.outcome for rollout in every],
        np.array([rollout.reward for rollout in every]),
        versions_B,
        np.zeros(len(every), dtype=np.bool_),
        [rollout.scores for rollout in every],
        None if samples.is_action is None else np.concatenate(samples.is_action),
        versions_N=mixed_versions(versions_B, versions_N, lengths_B),
    )


def table_of(batches: Sequence[Sequence[Group]]) -> pl.DataFrame:
    """The groups of each batch as a table, a row a rollout."""
    rows = [
        {
            "batch": number,
            "group": place,
            "prompt_row": group.prompt_row,
            "prompt": group.prompt,
            "since": group.since,
            **vars(rollout),
            "scores": json.dumps(rollout.scores),
        }
        for number, groups in enumerate(batches)
        for place, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    return pl.DataFrame(rows, schema=COLUMNS)


def groups_in(table: pl.DataFrame, batch: int) -> list[Group]:
    """The groups of one batch: the inverse of `table_of`."""
    groups: list[Group] = []
    for row in table.filter(pl.col("batch") == batch).to_dicts():
        del row["batch"]
        of_group = [row.pop(name) for name in ("group", "prompt_row", "prompt", "since")]
        if of_group[0] == len(groups):
            groups.append(Group(of_group[1], of_group[2], since=of_group[3]))
        groups[-1].rollouts.append(Rollout(**{**row, "scores": json.loads(row["scores"])}))
    return groups
