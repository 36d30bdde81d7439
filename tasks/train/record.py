"""The record of a step: its row of STEPS and its rows of TRAIN_ROLLOUTS."""

from typing import Any

import numpy as np

from tasks.train.batch import Bools, Floats, Rollouts, mixed_groups
from tasks.train.update import UpdateStats


def describe_step(rollouts: Rollouts, keep_B: Bools, stats: UpdateStats) -> dict[str, Any]:
    """What a step's rollouts and its update looked like; the update's columns are None where there was none."""
    lengths, tokens = rollouts.completion_tokens_B(), max(stats.num_tokens, 1)
    mixed = mixed_groups(rollouts.rewards_B[keep_B], rollouts.group_B[keep_B], len(rollouts.prompt_rows_Q))
    outcomes, updated = np.array(rollouts.outcomes), stats.num_tokens > 0
    return {
        "num_prompts": len(rollouts.prompt_rows_Q),
        "num_rollouts": len(keep_B),
        "num_kept": int(keep_B.sum()),
        "num_mixed_groups": int(mixed.sum()),
        "updated": updated,
        "reward_mean": float(rollouts.rewards_B[~rollouts.is_error_B()].mean()) if not all_errors(rollouts) else None,
        "reward_mean_kept": float(rollouts.rewards_B[keep_B].mean()) if keep_B.any() else None,
        "loss": stats.loss if updated else None,
        "entropy": stats.entropy / tokens if updated else None,
        "clip_rate": stats.clipped / tokens if updated else None,
        "log_ratio_mean": stats.log_ratio / tokens if updated else None,
        "log_ratio_max": stats.log_ratio_max if updated else None,
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        "truncated_rate": float((outcomes == "truncated").mean()),
        "error_rate": float((outcomes == "error").mean()),
    }


def all_errors(rollouts: Rollouts) -> bool:
    """Whether nothing of the step could be graded."""
    return bool(rollouts.is_error_B().all())


def rollout_rows(
    step: int, prompt_ids: list[str], rollouts: Rollouts, keep_B: Bools, advantages_B: Floats
) -> list[dict[str, Any]]:
    """The step's rows of TRAIN_ROLLOUTS, group by group."""
    first_of_group = np.searchsorted(rollouts.group_B, rollouts.group_B)
    samples = rollouts.samples
    return [
        {
            "step": step,
            "group": int(group),
            "prompt_id": prompt_ids[rollouts.prompt_rows_Q[group]],
            "sample_index": row - int(first_of_group[row]),
            "outcome": rollouts.outcomes[row],
            "reward": float(rollouts.rewards_B[row]),
            "kept": bool(keep_B[row]),
            "advantage": float(advantages_B[row]),
            "finish_reason": samples.finish_reasons[row],
            "prompt_tokens": len(rollouts.prompts[group]),
            "token_ids": samples.token_ids[row],
            "sampler_logprobs": samples.logprobs[row],
            "text": rollouts.texts[row],
        }
        for row, group in enumerate(rollouts.group_B)
    ]
