"""Plans and rollouts of training steps, made by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.common.artifacts import PROMPTS, SAMPLES
from tasks.engines.engine import Samples
from tasks.train.data.columns import Ints
from tasks.train.data.plan import Plan
from tasks.train.data.profile import Profile
from tasks.train.data.prompts import GroupRequest, Prompts
from tasks.train.data.rollouts import Observed, Rollouts, make_rollouts, merge
from tasks.train.data.tokens import Tokens
from tasks.train.settings import BatchSettings
from tasks.train.slots import Control, Requested, SoFar
from tests.policies import character_tokenizer

TOKENIZER = character_tokenizer()
START = SoFar(None, 0, 0)
BATCH = BatchSettings("rollouts", 8, "generated")


def plan_of(visits: Sequence[tuple[int, int]], batch: BatchSettings = BATCH) -> Plan:
    """Return a plan of one pass from the (phase, group size) of each visit."""
    phases, sizes = np.array(visits).T
    return Plan(np.arange(len(visits)), sizes, phases, phases * 0, batch)


def passes_of(num_prompts: int, size: int, num_passes: int, batch: BatchSettings = BATCH) -> Plan:
    """Return a plan that visits every prompt once per pass; each pass is a phase."""
    passes = np.repeat(np.arange(num_passes), num_prompts)
    rows = np.tile(np.arange(num_prompts), num_passes)
    return Plan(rows, np.full(len(rows), size), passes, passes, batch)


def prompts_of(num: int) -> pl.DataFrame:
    """Return training prompts of two levels and many lengths."""
    return PROMPTS.frame(
        [
            {
                **PROMPTS.example,
                "prompt_id": f"p{k:05d}",
                "prompt": "?" * (k % 50),
                "messages": None,
                "level": str(k % 2),
            }
            for k in range(num)
        ]
    )


def rollouts_of(
    rewards: Sequence[float],
    groups: Sequence[int],
    lengths: Sequence[int] | None = None,
    prompt_rows: Sequence[int] | None = None,
    errors: int = 0,
) -> Rollouts:
    """Return rollouts with these rewards and groups; the last `errors` could not be graded. Without
    `prompt_rows` the row of a group is its number."""
    num, num_groups = len(rewards), max(groups, default=-1) + 1
    rows = np.arange(num_groups) if prompt_rows is None else np.array(prompt_rows)
    outcomes = ["correct" if reward > 0 else "wrong" for reward in rewards]
    outcomes[num - errors :] = ["error"] * errors
    lengths = [1] * num if lengths is None else lengths
    samples = Samples([[5] * n for n in lengths], [[0.0] * n for n in lengths], ["stop"] * num)
    group_B = np.array(groups, dtype=np.int64)
    made = graded([[5]] * len(rows), group_B, samples, np.array(rewards, dtype=np.float64), rows)
    return made.with_columns(outcome=outcomes)


def graded(
    prompts: list[list[int]],
    group_B: Ints,
    samples: Samples,
    rewards: "np.ndarray",
    prompt_rows: Ints | None = None,
) -> Rollouts:
    """Return one group of fresh rollouts per prompt, with these rewards."""
    return make_rollouts(
        np.arange(len(prompts)) if prompt_rows is None else prompt_rows,
        prompts,
        group_B,
        token_ids=samples.token_ids,
        logprobs=samples.logprobs,
        versions=[[0] * len(ids) for ids in samples.token_ids],
        reason=samples.finish_reasons,
        outcome="wrong",
        reward=rewards,
    )


def estimated(rollouts: Rollouts, advantages_B: "np.ndarray") -> Rollouts:
    """Keep all rollouts, with these advantages."""
    keep_B = np.ones(len(advantages_B), dtype=np.bool_)
    return rollouts.estimated(keep_B, advantages_B[rollouts.owner_N()])


def asked_of(prompt_rows: Ints | None, answers: Sequence[str] = ("7",) * 4) -> Requested:
    """Return the context of the slot `generate` for prompts with these answers."""
    row = {**PROMPTS.example, "prompt": "?", "messages": None}
    rows = [{**row, "prompt_id": f"p{k}", "answer": text} for k, text in enumerate(answers)]
    return Requested(PROMPTS.frame(rows), prompt_rows, TOKENIZER, (TOKENIZER.eos_token_id,))


def answer_to(
    request: GroupRequest,
    rewards: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    errors: int = 0,
) -> Rollouts:
    """Return the rollouts of a request, all wrong without `rewards`."""
    groups = np.repeat(np.arange(len(request.counts)), request.counts).tolist()
    rewards = [0.0] * len(groups) if rewards is None else rewards
    return rollouts_of(rewards, groups, lengths, request.prompt_rows.tolist(), errors)


def requested(
    control: Control, rng: np.random.Generator | int = 0, so_far: SoFar = START
) -> GroupRequest:
    """Return the next request of a control, which must have one."""
    request = control.next(so_far, np.random.default_rng(rng))
    assert request is not None
    return request


def after(*parts: Rollouts) -> SoFar:
    """Return a step after these answers of its own groups."""
    return SoFar(merge(parts), len(parts), 0) if parts else START


def merge_requests(parts: Sequence[Rollouts], numbers: Sequence[Ints]) -> Rollouts:
    """Merge the rollouts of several requests of one step, group by group: `numbers[i]` are the
    groups of part i within the step."""
    merged = merge(parts)
    of_step = merged.with_columns(group=np.concatenate(numbers)[merged.group_B]).table
    # rollouts that joined a group follow the earlier ones of the group
    return Rollouts.of(of_step.sort("group", maintain_order=True))


def observed_of(rollouts: Rollouts, seed: int = 0, size: int = 3) -> Rollouts:
    """Return the rollouts as observed by a policy that differs slightly from their sampler."""
    rng = np.random.default_rng(seed)
    num, num_tokens = len(rollouts.group_B), len(rollouts.owner_N())
    observed = Observed(
        rollouts.logprobs_N + 0.01 * rng.standard_normal(num_tokens),
        rng.random(num_tokens),
        rng.standard_normal((num_tokens, size)),
        rng.standard_normal((num, size)),
        0.5 + rng.random(num),
    )
    return replace(rollouts, observed=observed)


def play(
    control: Control, rng: np.random.Generator, reward: Callable[[int], float] = lambda row: 0.0
) -> tuple[list[GroupRequest], Rollouts] | None:
    """Return one step of a control: its requests and its rollouts, with one reward per prompt. None
    at the end of the run. The caller calls `observe`."""
    requests: list[GroupRequest] = []
    parts: list[Rollouts] = []
    numbers: list[Ints] = []
    rollouts: Rollouts | None = None
    while request := control.next(SoFar(rollouts, len(requests), 0), rng):
        rewards = [reward(int(row)) for row in np.repeat(request.prompt_rows, request.counts)]
        numbers.append(request.groups(0 if rollouts is None else len(rollouts.prompt_rows_Q)))
        requests.append(request)
        parts.append(answer_to(request, rewards))
        rollouts = merge_requests(parts, numbers)
    return (requests, rollouts) if rollouts else None


def profile_of(outcomes: dict[str, list[str]]) -> Profile:
    """Return a profile of four prompts with samples of these outcomes; the first sample has no
    log-probabilities."""
    rows = [
        {
            "prompt_id": prompt_id,
            "sample_index": k,
            "outcome": outcome,
            "reward": float(outcome == "correct"),
            "finish_reason": "length" if outcome == "truncated" else "stop",
            "token_ids": [10 * k + place for place in range(k + 1)],
            "logprobs": [-0.5] * (k + 1) if k else None,
        }
        for prompt_id, prompt_outcomes in outcomes.items()
        for k, outcome in enumerate(prompt_outcomes)
    ]
    prompts = PROMPTS.frame(
        [{**PROMPTS.example, "prompt_id": f"p{row}", "prompt": "x" * (row + 1)} for row in range(4)]
    )
    encode = lambda table: [[7] * len(text) for text in table["prompt"]]  # noqa: E731
    return Profile(SAMPLES.frame(rows), Prompts(prompts, encode))


def tokens_of(
    logprobs: torch.Tensor,
    advantages: torch.Tensor | Sequence[float] | float = 1.0,
    old: torch.Tensor | float = 0.0,
    rows: Sequence[int] | None = None,
    **others: Any,
) -> Tokens:
    """Return tokens of weight 1 with these log-probabilities. A single value applies to every
    token, and without `rows` each token is a separate rollout."""

    def filled(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=logprobs.dtype).expand_as(logprobs)

    row_N = torch.arange(len(logprobs)) if rows is None else torch.as_tensor(rows)
    own = filled(old), torch.ones_like(logprobs), filled(advantages)
    return replace(Tokens(logprobs, *own, row_N, int(row_N.max()) + 1), **others)
