"""The record of a step: its row of STEPS and its rows of TRAIN_ROLLOUTS."""

from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.train.learner.update import UpdateStats
from tasks.train.rollouts import Bools, Floats, Rollouts, mixed_groups, ragged


def describe_step(rollouts: Rollouts, keep_B: Bools, stats: UpdateStats) -> dict[str, Any]:
    """What a step's rollouts and its update looked like; the update's columns are None where there
    was none. What is said of rollouts is of the fresh ones, what is kept is of all."""
    fresh = rollouts.where(~rollouts.replayed_B)
    lengths, graded = fresh.completion_tokens_B(), fresh.where(~fresh.is_error_B())
    # what was sampled, whatever select made of it
    mixed = mixed_groups(graded.rewards_B, graded.group_B, len(rollouts.prompt_rows_Q))
    outcomes = np.array(fresh.outcomes)
    return {
        "num_prompts": len(np.unique(fresh.group_B)),
        "num_rollouts": len(fresh.group_B),
        "num_replayed": int(rollouts.replayed_B.sum()),
        "num_kept": int(keep_B.sum()),
        "num_mixed_groups": int(mixed.sum()),
        "reward_mean": float(graded.rewards_B.mean()) if len(graded.group_B) else None,
        "reward_mean_kept": float(rollouts.rewards_B[keep_B].mean()) if keep_B.any() else None,
        **describe_update(stats),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_p95": float(np.quantile(lengths, 0.95)),
        "completion_tokens_max": int(lengths.max()),
        "truncated_rate": float((outcomes == "truncated").mean()),
        "error_rate": float((outcomes == "error").mean()),
    }


def describe_update(stats: UpdateStats) -> dict[str, float | None]:
    """The mean loss of the updates, and means over the tokens that were computed; None where there
    were none."""
    names = (
        "loss",
        "entropy",
        "clip_rate",
        "weight_capped_rate",
        "kl",
        "log_ratio_mean",
        "log_ratio_max",
        "weight_ess_rate",
    )
    quantiles = {"log_ratio_p01": 0.01, "log_ratio_p50": 0.5, "log_ratio_p99": 0.99}
    if not stats.num_tokens:
        return dict.fromkeys((*names, *quantiles))
    ratios = torch.cat(stats.log_ratios).float().cpu().numpy()
    gaps = np.abs(ratios)
    sums = (stats.entropy, stats.clipped, stats.capped, stats.kl)
    means = [total / stats.num_tokens for total in sums]
    # a step of replayed rollouts alone has nothing that the present policy sampled
    largest = [float(gaps.mean()), float(gaps.max())] if len(gaps) else [None, None]
    # the share of tokens that as many equally weighted ones would be worth (Kish)
    squares = max(stats.squared_weights * stats.num_tokens, 1e-300)
    found = [stats.loss / max(len(stats.norms), 1), *means, *largest, stats.weights**2 / squares]
    values = dict(zip(names, found, strict=True))
    return {
        **values,
        **{
            name: float(np.quantile(ratios, share)) if len(ratios) else None
            for name, share in quantiles.items()
        },
    }


def rollout_rows(
    step: int,
    prompt_ids: pl.Series,
    rollouts: Rollouts,
    keep_B: Bools,
    advantages_B: Floats,
) -> list[dict[str, Any]]:
    """The step's rows of TRAIN_ROLLOUTS, group by group."""
    first_of_group = np.searchsorted(rollouts.group_B, rollouts.group_B)
    samples, ids_Q = rollouts.samples, prompt_ids[rollouts.prompt_rows_Q].to_list()
    lengths_B = rollouts.completion_tokens_B()
    is_action_B, versions_B = (
        [None] * len(lengths_B) if values_N is None else ragged(values_N, lengths_B)
        for values_N in (rollouts.is_action_N, rollouts.versions_N)
    )
    return [
        {
            "step": step,
            "group": int(group),
            "prompt_id": ids_Q[group],
            "sample_index": row - int(first_of_group[row]),
            "outcome": rollouts.outcomes[row],
            "reward": float(rollouts.rewards_B[row]),
            "kept": bool(keep_B[row]),
            "advantage": float(advantages_B[row]),
            "finish_reason": samples.finish_reasons[row],
            "prompt_tokens": len(rollouts.prompts[group]),
            "version": int(rollouts.versions_B[row]),
            "replayed": bool(rollouts.replayed_B[row]),
            "token_ids": samples.token_ids[row],
            "sampler_logprobs": samples.logprobs[row],
            "is_action": is_action_B[row],
            "versions": versions_B[row],
            "text": rollouts.texts[row],
        }
        for row, group in enumerate(rollouts.group_B)
    ]
