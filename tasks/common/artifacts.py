"""Every table of the pipeline, once: its columns, and a row to look at. Stages meet only in these
files."""

import polars as pl

from tasks.common.layout import Layout as Layout
from tasks.common.table import Table as Table

OUTCOMES = ("correct", "wrong", "unparsed", "truncated", "timeout", "error")
PHASES = ("profile", "generate", "score", "update", "evaluate", "branch")

PROMPTS = Table(
    "prompts",
    {
        "prompt_id": pl.String,
        "prompt": pl.String,
        "messages": pl.String,
        "template": pl.String,
        "answer": pl.String,
        "verifier": pl.String,
        "source": pl.String,
        "level": pl.String,
    },
    {
        "prompt_id": "5d41402abc4b2a76",
        "prompt": "State the final answer to the following arithmetic problem: 4 + 3 =",
        "messages": '[{"role": "user", "content": "State the final answer to ... 4 + 3 ="}]',
        "template": "Question: {prompt}",
        "answer": "7",
        "verifier": "numeric",
        "source": "reasoning_gym/chain_sum",
        "level": "2",
    },
)
"""`messages` is null for a plain prompt, which is sampled as it stands; `template` is what was put
around it, with `{prompt}` in its place, or null. Else `messages` is JSON, a list of messages with
role and content, which the policy's chat template renders; `prompt` is then only what is asked, to
be read by people. The example shows both."""

REJECTED = Table(
    "rejected",
    {
        "source": pl.String,
        "line": pl.Int64,
        "reason": pl.String,
        "detail": pl.String,
        "content": pl.String,
    },
    {
        "source": "math.json",
        "line": 887,
        "reason": "empty_answer",
        "detail": "field 'answer' is null",
        "content": '{"problem": "...", "answer": null}',
    },
)

CONTAMINATION = Table(
    "contamination",
    {
        "kind": pl.String,
        "overlap": pl.Float64,
        "source": pl.String,
        "line": pl.Int64,
        "prompt": pl.String,
        "eval_split": pl.String,
        "eval_prompt_id": pl.String,
        "eval_source": pl.String,
        "eval_line": pl.Int64,
        "eval_prompt": pl.String,
    },
    {
        "kind": "near",
        "overlap": 0.83,
        "source": "math",
        "line": 12,
        "prompt": "What is the sum of all primes below 10?",
        "eval_split": "test",
        "eval_prompt_id": "5d41402abc4b2a76",
        "eval_source": "verl/deepscaler",
        "eval_line": 7,
        "eval_prompt": "Find the sum of all primes below 10.",
    },
)
"""One row for a prompt dropped from training and a prompt of an evaluation split that asks the
same. `kind` is exact (equal but for case and white space) or near; `overlap` is the share of
n-grams."""

ROLLOUTS = Table(
    "rollouts",
    {
        "prompt_id": pl.String,
        "sample_index": pl.Int32,
        "greedy": pl.Boolean,
        "outcome": pl.String,
        "reward": pl.Float64,
        "score": pl.Float64,
        "parts": pl.List(pl.Struct({"verifier": pl.String, "score": pl.Float64})),
        "answer": pl.String,
        "text": pl.String,
        "finish_reason": pl.String,
        "prompt_tokens": pl.Int32,
        "completion_tokens": pl.Int32,
    },
    {
        "prompt_id": "5d41402abc4b2a76",
        "sample_index": 3,
        "greedy": False,
        "outcome": "correct",
        "reward": 1.0,
        "score": 1.0,
        "parts": [],
        "answer": "7",
        "text": "7",
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "completion_tokens": 2,
    },
)

"""`score` is the verifier's own mark in [0, 1] where it gives one, else 1 for `correct` and 0 for
the rest; `parts` are those of a composite's verifiers. `reward` is 1 for `correct` and 0 for the
rest, of a composite the weighted sum."""

SAMPLES = Table(
    "samples",
    {
        "prompt_id": pl.String,
        "sample_index": pl.Int32,
        "outcome": pl.String,
        "reward": pl.Float64,
        "finish_reason": pl.String,
        "token_ids": pl.List(pl.Int32),
        "logprobs": pl.List(pl.Float32),
    },
    {
        "prompt_id": "5d41402abc4b2a76",
        "sample_index": 3,
        "outcome": "correct",
        "reward": 1.0,
        "finish_reason": "stop",
        "token_ids": [11, 2],
        "logprobs": [-0.1, -0.01],
    },
)
"""The rollouts of a profile as tokens, to be trained on; `logprobs` is null where the engine did
not keep them (`store.logprobs`)."""

PROFILE = Table(
    "profile",
    {
        "prompt_id": pl.String,
        "num_samples": pl.Int32,
        **dict.fromkeys(OUTCOMES, pl.Int32),
        "pass_rate": pl.Float64,
        "pass_rate_low": pl.Float64,
        "pass_rate_high": pl.Float64,
        "prompt_tokens": pl.Int32,
        "completion_tokens": pl.Int64,
        "completion_tokens_max": pl.Int32,
        "truncated_rate": pl.Float64,
    },
    {
        "prompt_id": "5d41402abc4b2a76",
        "num_samples": 8,
        "correct": 2,
        "wrong": 5,
        "unparsed": 0,
        "truncated": 1,
        "timeout": 0,
        "error": 0,
        "pass_rate": 0.25,
        "pass_rate_low": 0.0715,
        "pass_rate_high": 0.5907,
        "prompt_tokens": 9,
        "completion_tokens": 96,
        "completion_tokens_max": 32,
        "truncated_rate": 0.125,
    },
)
"""`num_samples` counts all samples, `error` among them; pass_rate = correct / (num_samples -
error), null when every sample was an error; the interval is Wilson's, 95 %; `completion_tokens` is
the sum over the samples."""

PLAN = Table(
    "plan",
    {
        "visit": pl.Int64,
        "pass": pl.Int32,
        "phase": pl.Int32,
        "order": pl.Int64,
        "prompt_id": pl.String,
        "group_size": pl.Int32,
    },
    {
        "visit": 0,
        "pass": 0,
        "phase": 0,
        "order": 0,
        "prompt_id": "5d41402abc4b2a76",
        "group_size": 4,
    },
)
"""One row a visit, in the order of training. `phase` counts up over the whole plan (a step never
straddles two); `order` is the place within the phase."""

DECISIONS = Table(
    "decisions",
    {
        "prompt_id": pl.String,
        "pass_rate": pl.Float64,
        "decision": pl.String,
        "group_size": pl.Int32,
        "reason": pl.String,
    },
    {
        "prompt_id": "5d41402abc4b2a76",
        "pass_rate": 0.25,
        "decision": "learnable",
        "group_size": 4,
        "reason": "solved 2 of 8: one success expected in 4 rollouts",
    },
)

STEPS = Table(
    "steps",
    {
        "step": pl.Int64,
        "pass": pl.Int32,
        "phase": pl.Int32,
        "num_prompts": pl.Int32,
        "num_rollouts": pl.Int32,
        "num_replayed": pl.Int32,
        "num_kept": pl.Int32,
        "num_mixed_groups": pl.Int32,
        "updated": pl.Boolean,
        "num_updates": pl.Int32,
        "nonfinite": pl.Boolean,
        "reward_mean": pl.Float64,
        "reward_mean_kept": pl.Float64,
        "learning_rate": pl.Float64,
        "loss": pl.Float64,
        "grad_norm": pl.Float64,
        "entropy": pl.Float64,
        "clip_rate": pl.Float64,
        "weight_capped_rate": pl.Float64,
        "weight_ess_rate": pl.Float64,
        "kl": pl.Float64,
        "log_ratio_mean": pl.Float64,
        "log_ratio_p01": pl.Float64,
        "log_ratio_p50": pl.Float64,
        "log_ratio_p99": pl.Float64,
        "log_ratio_max": pl.Float64,
        "completion_tokens_mean": pl.Float64,
        "completion_tokens_p95": pl.Float64,
        "completion_tokens_max": pl.Int32,
        "truncated_rate": pl.Float64,
        "error_rate": pl.Float64,
        "tokens": pl.Int64,
        "flops_charged": pl.Float64,
        "flops_charged_mixed": pl.Float64,
        "flops_charged_paper": pl.Float64,
        "flops_executed": pl.Float64,
    },
    {
        "step": 0,
        "pass": 0,
        "phase": 0,
        "num_prompts": 4,
        "num_rollouts": 32,
        "num_replayed": 0,
        "num_kept": 32,
        "num_mixed_groups": 3,
        "updated": True,
        "num_updates": 1,
        "nonfinite": False,
        "reward_mean": 0.41,
        "reward_mean_kept": 0.41,
        "learning_rate": 3e-4,
        "loss": -0.01,
        "grad_norm": 0.4,
        "entropy": 0.3,
        "clip_rate": 0.0,
        "weight_capped_rate": 0.0,
        "weight_ess_rate": 1.0,
        "kl": 0.0,
        "log_ratio_mean": 1e-7,
        "log_ratio_p01": -1e-6,
        "log_ratio_p50": 0.0,
        "log_ratio_p99": 1e-6,
        "log_ratio_max": 3e-6,
        "completion_tokens_mean": 14.5,
        "completion_tokens_p95": 29.0,
        "completion_tokens_max": 31,
        "truncated_rate": 0.0,
        "error_rate": 0.0,
        "tokens": 900,
        "flops_charged": 3.1e9,
        "flops_charged_mixed": 2.2e9,
        "flops_charged_paper": 3.1e9,
        "flops_executed": 2.2e9,
    },
)
"""The `flops_` columns are running totals of training, this step included, without profiling
and validation. `num_mixed_groups` counts what was sampled, before `select`. `log_ratio_mean` and
`log_ratio_max` are of absolute values; the quantiles are signed, trainer minus sampler, before any
clip. `weight_ess_rate` is the effective sample size of the importance weights as a share of the
tokens, `weight_capped_rate` the share that the cap cut. `updated` is false where no group was mixed
(without KL), and where the gradient was not finite."""

CURVE = Table(
    "curve",
    {
        "step": pl.Int64,
        "flops_charged": pl.Float64,
        "flops_charged_mixed": pl.Float64,
        "flops_executed": pl.Float64,
        "rollouts": pl.Int64,
        "accuracy": pl.Float64,
        "accuracy_low": pl.Float64,
        "accuracy_high": pl.Float64,
        "branch": pl.Float64,
    },
    {
        "step": 12,
        "flops_charged": 4.1e10,
        "flops_charged_mixed": 2.6e10,
        "flops_executed": 3.0e10,
        "rollouts": 384,
        "accuracy": 0.52,
        "accuracy_low": 0.48,
        "accuracy_high": 0.56,
        "branch": 0.25,
    },
)
"""Validation accuracy after `step` steps (step 0: before training); the flops columns are
training's running totals. `branch` is the share of the run at which a decayed branch ended, null
on the trunk."""

TRAIN_ROLLOUTS = Table(
    "train rollouts",
    {
        "step": pl.Int64,
        "group": pl.Int32,
        "prompt_id": pl.String,
        "sample_index": pl.Int32,
        "outcome": pl.String,
        "reward": pl.Float64,
        "kept": pl.Boolean,
        "advantage": pl.Float64,
        "finish_reason": pl.String,
        "prompt_tokens": pl.Int32,
        "version": pl.Int64,
        "replayed": pl.Boolean,
        "token_ids": pl.List(pl.Int32),
        "sampler_logprobs": pl.List(pl.Float32),
        "is_action": pl.List(pl.Boolean),
        "versions": pl.List(pl.Int64),
        "text": pl.String,
    },
    {
        "step": 0,
        "group": 0,
        "prompt_id": "5d41402abc4b2a76",
        "sample_index": 0,
        "outcome": "correct",
        "reward": 1.0,
        "kept": True,
        "advantage": 1.0,
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "version": 0,
        "replayed": False,
        "token_ids": [11, 2],
        "sampler_logprobs": [-0.1, -0.01],
        "is_action": [True, True],
        "versions": [0, 1],
        "text": "7",
    },
    later=("versions",),
)
"""`version` counts the updates of the policy that wrote the oldest token. `is_action` says which
tokens are the policy's own, the others being an environment's; null where all are. `versions` are
those behind the tokens; null where all of a step are of their rollout's."""

STORE = Table(
    "rollout store",
    {
        "prompt_digest": pl.String,
        "sample_index": pl.Int32,
        "token_ids": pl.List(pl.Int32),
        "logprobs": pl.List(pl.Float32),
        "text": pl.String,
        "finish_reason": pl.String,
        "prompt_tokens": pl.Int32,
        "completion_tokens": pl.Int32,
        "flops": pl.Float64,
        "seconds": pl.Float64,
        "engine": pl.String,
        "engine_version": pl.String,
    },
    {
        "prompt_digest": "0cc175b9c0f1b6a8",
        "sample_index": 3,
        "token_ids": [11, 2],
        "logprobs": [-0.5, -0.25],
        "text": "7",
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "flops": 1.1e7,
        "seconds": 0.0004,
        "engine": "hf",
        "engine_version": "5.19.0",
    },
)
"""One shard of the store. Policy digest, sampling parameters and base seed are its folder.
`logprobs`, of the distribution that was drawn from, are null where `store.logprobs` was off."""

TABLES = (
    PROMPTS,
    REJECTED,
    CONTAMINATION,
    ROLLOUTS,
    SAMPLES,
    PROFILE,
    PLAN,
    DECISIONS,
    STEPS,
    CURVE,
    TRAIN_ROLLOUTS,
    STORE,
)
