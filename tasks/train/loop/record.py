"""The record of a step: its row of STEPS and its rows of TRAIN_ROLLOUTS."""

from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.train.learner.update import UpdateStats
from tasks.train.rollouts import OWN_TOKENS, Rollouts, mixed_groups


def describe_step(rollouts: Rollouts, stats: UpdateStats) -> dict[str, Any]:
    """Return the columns of STEPS about a step's rollouts and its update; columns of the update are
    None if there was none. Columns about rollouts count the fresh ones, `kept` counts all."""
    fresh, kept = rollouts.where(~rollouts.replayed_B), rollouts.where(rollouts.kept_B)
    lengths, graded = fresh.completion_tokens_B(), fresh.where(~fresh.is_error_B())
    # over all sampled rollouts, independent of select
    mixed = mixed_groups(graded.rewards_B, graded.group_B, len(rollouts.prompt_rows_Q))
    outcomes = fresh.table["outcome"].to_numpy()
    return {
        "num_prompts": len(np.unique(fresh.group_B)),
        "num_rollouts": len(fresh.group_B),
        "num_replayed": int(rollouts.replayed_B.sum()),
        "num_kept": len(kept.table),
        "num_mixed_groups": int(mixed.sum()),
        "reward_mean": float(graded.rewards_B.mean()) if len(graded.group_B) else None,
        "reward_mean_kept": float(kept.rewards_B.mean()) if len(kept.table) else None,
        **describe_update(stats),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_p95": float(np.quantile(lengths, 0.95)),
        "completion_tokens_max": int(lengths.max()),
        "truncated_rate": float((outcomes == "truncated").mean()),
        "error_rate": float((outcomes == "error").mean()),
    }


def describe_update(stats: UpdateStats) -> dict[str, float | None]:
    """Return the mean loss of the updates, and means over the computed tokens; None if there were
    none."""
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
    # a step of only replayed rollouts has no tokens of the current policy
    largest = [float(gaps.mean()), float(gaps.max())] if len(gaps) else [None, None]
    # the effective sample size as a share of the tokens (Kish)
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


def record_rollouts(step: int, prompt_ids: pl.Series, rollouts: Rollouts) -> pl.DataFrame:
    """Return the step's rows of TRAIN_ROLLOUTS, group by group."""
    table = rollouts.table
    masked = table["is_action"].null_count() < len(table)
    mixed = (rollouts.versions_N() != rollouts.versions_B[rollouts.owner_N()]).any()
    columns: dict[str, Any] = {
        "step": pl.lit(step),
        "prompt_id": prompt_ids[table["prompt_row"]],
        "sample_index": pl.int_range(pl.len()).over("group"),
        "advantage": rollouts.advantage_means_B(),
        "finish_reason": "reason",
        "prompt_tokens": pl.col("prompt").list.len(),
        "version": rollouts.versions_B,
        "sampler_logprobs": "logprobs",
        "is_action": OWN_TOKENS if masked else None,
        "versions": "versions" if mixed else None,
    }
    found = table.with_columns(**columns).select([*TRAIN_ROLLOUTS.columns])
    return found.cast(pl.Schema(TRAIN_ROLLOUTS.columns)).rechunk()
