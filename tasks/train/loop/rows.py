"""The rows of a step: one of STEPS, and those of TRAIN_ROLLOUTS."""

from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.train.data.columns import OWN_TOKENS
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Rollouts
from tasks.train.learner.update import UpdateStats


def describe_step(rollouts: Rollouts, stats: UpdateStats) -> dict[str, Any]:
    """Return the columns of STEPS about a step's rollouts and its update, if there was one. Columns
    about rollouts omit replayed ones, except `num_replayed`, `num_kept` and `reward_mean_kept`."""
    fresh_B, kept_B, rewards_B = ~rollouts.replayed_B, rollouts.kept_B, rollouts.rewards_B
    lengths, graded_B = rollouts.completion_tokens_B()[fresh_B], fresh_B & ~rollouts.is_error_B()
    # over all fresh rollouts, whatever `select` keeps
    graded_groups, num_groups = rollouts.group_B[graded_B], len(rollouts.prompt_rows_Q)
    mixed = mixed_groups(rewards_B[graded_B], graded_groups, num_groups)
    outcomes = rollouts.table["outcome"].to_numpy()[fresh_B]
    return {
        "num_prompts": len(np.unique(rollouts.group_B[fresh_B])),
        "num_rollouts": int(fresh_B.sum()),
        "num_replayed": int(rollouts.replayed_B.sum()),
        "num_kept": int(kept_B.sum()),
        "num_mixed_groups": int(mixed.sum()),
        "reward_mean": float(rewards_B[graded_B].mean()) if graded_B.any() else None,
        "reward_mean_kept": float(rewards_B[kept_B].mean()) if kept_B.any() else None,
        **describe_update(stats),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_p95": float(np.quantile(lengths, 0.95)),
        "completion_tokens_max": int(lengths.max()),
        "truncated_rate": float((outcomes == "truncated").mean()),
        "error_rate": float((outcomes == "error").mean()),
    }


def describe_update(stats: UpdateStats) -> dict[str, float]:
    """Return the mean loss of the updates, and means over the tokens that they computed; {} without
    such tokens."""
    num = stats.num_tokens
    if not num:
        return {}
    columns = {
        "loss": stats.loss / max(len(stats.norms), 1),
        "entropy": stats.entropy / num,
        "clip_rate": stats.clipped / num,
        "weight_capped_rate": stats.capped / num,
        "kl": stats.kl / num,
        # the effective sample size as a share of the tokens (Kish)
        "weight_ess_rate": stats.weights**2 / max(stats.squared_weights * num, 1e-300),
    }
    ratios = torch.cat(stats.log_ratios).float().cpu().numpy()
    if not len(ratios):  # a step of only replayed rollouts has no tokens of the current policy
        return columns
    gaps = np.abs(ratios)
    columns |= {"log_ratio_mean": float(gaps.mean()), "log_ratio_max": float(gaps.max())}
    quantiles = {"log_ratio_p01": 0.01, "log_ratio_p50": 0.5, "log_ratio_p99": 0.99}
    return columns | {name: float(np.quantile(ratios, share)) for name, share in quantiles.items()}


def rollout_rows(step: int, prompt_ids: pl.Series, rollouts: Rollouts) -> pl.DataFrame:
    """Return the step's rows of TRAIN_ROLLOUTS, group by group."""
    table = rollouts.table
    masked = table["is_action"].null_count() < len(table)
    mixed = (rollouts.versions_N() != rollouts.versions_B[rollouts.owner_N()]).any()
    sizes_Q, nulls = rollouts.sizes_Q(), [None] * len(table)
    columns = {
        **table.to_dict(),
        "step": np.full(len(table), step),
        "prompt_id": prompt_ids[table["prompt_row"]],
        "sample_index": np.arange(len(table)) - (np.cumsum(sizes_Q) - sizes_Q)[rollouts.group_B],
        "advantage": rollouts.own_means_B(rollouts.advantages_N),
        "finish_reason": table["reason"],
        "prompt_tokens": rollouts.prompt_tokens_B(),
        "version": rollouts.versions_B,
        "sampler_logprobs": table["logprobs"],
        "is_action": table.select(OWN_TOKENS).to_series() if masked else nulls,
        "versions": table["versions"] if mixed else nulls,
    }
    schema = TRAIN_ROLLOUTS.columns
    return pl.DataFrame({name: columns[name] for name in schema}, schema).rechunk()
