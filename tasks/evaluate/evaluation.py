"""Evaluate a policy on a set of prompts: pass@1 and greedy accuracy (overall, with intervals, and
per level), and unbiased pass@k (overall).

`baseline` and `evaluate` share this code, so the policy is measured the same way before and after
training, on the same prompts with the same seeds. Intervals resample prompts, not samples, because
a prompt's samples are not independent."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tasks.common.artifacts import OUTCOMES, PROMPTS, Layout
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError, digest_file, rounded
from tasks.common.stage import Stage
from tasks.common.statistics import bootstrap_interval, pass_at_k, score_prompts
from tasks.evaluate.settings import Evaluate
from tasks.grading.graded import graded_rollouts, write_rollouts
from tasks.grading.settings import Verify
from tasks.models.policy import Policy
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts, sampling_cost
from tasks.store.usage import Usage, cell_name


def run_evaluation(run: Stage, policy: Policy, out: Path) -> None:
    """Measure `policy` on the test prompts, and write the results to `out`, for the stages
    `baseline` and `evaluate`."""
    settings = run.section("evaluate", Evaluate)
    test = run.layout.prompts("test")
    prompts = PROMPTS.read(test)
    if prompts.is_empty():
        raise ArtifactError(
            f"{test} has no prompts, but {run.name} measures the policy on them: set "
            "ingest.splits.test to at least 1"
        )
    sampler = run.sections(SamplerSettings)
    run.tracker.params({"evaluate": asdict(settings), "sampling": asdict(sampler.sampling)})
    run.tracker.dataset("test", test, digest_file(test), "evaluate")
    metrics, usage = evaluate_policy(
        prompts,
        policy,
        settings,
        sampler,
        run.section("verify", Verify),
        run.layout,
        cell_name(run.name, run.recipe, run.seed),
        out,
    )
    noted = {"policy": policy.digest, "settings": asdict(settings)}
    write_checked(out / "metrics.json", {**rounded(metrics), **noted})
    run.tracker.metrics(
        {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    )
    run.tracker.metrics(usage.metrics())
    run.tracker.tags({"rollouts": usage.summary})


def evaluate_policy(
    prompts: pl.DataFrame,
    policy: Policy,
    settings: Evaluate,
    sampler: SamplerSettings,
    verify: Verify,
    layout: Layout,
    cell: str,
    out: Path,
) -> tuple[dict[str, Any], Usage]:
    """Write the rollouts (sampled and greedy) to `out`/rollouts.parquet. Return the metrics, and
    the numbers of reused and newly sampled rollouts."""
    stored, stored_greedy = (
        StoredRollouts(prompts, policy, number, sampler, layout, cell=cell, greedy=greedy)
        for number, greedy in ((settings.num_samples, False), (1, True))
    )
    tally = Tally()
    with (
        graded_rollouts(stored, verify, out, greedy=False, judged=layout.judged) as sampled,
        graded_rollouts(stored_greedy, verify, out, greedy=True, judged=layout.judged) as greedy,
    ):
        write_rollouts(out / "rollouts.parquet", [sampled, greedy], tally.add)
    metrics = measure(tally, prompts, settings)
    costs = pl.concat([stored.costs(), stored_greedy.costs()])
    cost = sampling_cost(costs, policy, "evaluate", charged=False)
    judged = sampled.judge_flops + greedy.judge_flops
    metrics["flops_executed"] = cost.total("executed") + judged
    metrics["tokens"] = cost.total("tokens")
    return metrics, stored.usage + stored_greedy.usage


class Tally:
    """Counts of a ROLLOUTS table for the metrics; rollouts are added part by part."""

    def __init__(self) -> None:
        self.scores: list[pl.DataFrame] = []
        self.outcomes: Counter[str] = Counter()  # of sampled rollouts only, like `truncated`
        self.truncated = 0

    def add(self, rollouts: pl.DataFrame) -> None:
        """Add rollouts to the counts. Those of one prompt may be spread over several calls."""
        sampled = rollouts.filter(~pl.col("greedy"))
        self.scores.append(score_prompts(rollouts))
        self.outcomes.update(dict(sampled["outcome"].value_counts().iter_rows()))
        self.truncated += int((sampled["finish_reason"] == "length").sum())

    def by_prompt(self) -> pl.DataFrame:
        """Return the result of `score_prompts` for all rollouts."""
        return (
            pl.concat(self.scores)
            .group_by("prompt_id", maintain_order=True)
            .agg(pl.col("correct", "trials").sum(), pl.col("greedy").drop_nulls().first())
        )


def measure(tally: Tally, prompts: pl.DataFrame, settings: Evaluate) -> dict[str, Any]:
    """Return the metrics of graded rollouts. An `error` is excluded from the accuracies; any other
    failure counts as 0. Raise ArtifactError if no sample or no greedy completion is graded."""
    scores = tally.by_prompt().join(
        prompts.select("prompt_id", "source", "level"), on="prompt_id", maintain_order="left"
    )
    graded = scores.filter(pl.col("trials") > 0)
    rates = (graded["correct"] / graded["trials"]).to_numpy()
    greedy = graded["greedy"].drop_nulls().to_numpy()
    if not len(rates) or not len(greedy):
        raise ArtifactError(
            f"no {'greedy completion' if len(rates) else 'sample'} of any test prompt could be "
            "graded: fix the verifier or the gold answers"
        )
    rng = np.random.default_rng(0)  # seeded, so that equal rollouts yield equal intervals
    low, high = bootstrap_interval(rates, settings.num_bootstrap, rng)
    greedy_low, greedy_high = bootstrap_interval(greedy, settings.num_bootstrap, rng)
    return {
        "num_prompts": len(scores),
        "num_samples": settings.num_samples,
        "pass_at_1": float(rates.mean()),
        "pass_at_1_low": low,
        "pass_at_1_high": high,
        "pass_at": pass_at(graded, settings),
        "greedy": float(greedy.mean()),
        "greedy_low": greedy_low,
        "greedy_high": greedy_high,
        "truncated_rate": tally.truncated / tally.outcomes.total(),
        "error_rate": tally.outcomes["error"] / tally.outcomes.total(),
        "outcomes": {outcome: tally.outcomes[outcome] for outcome in OUTCOMES},
        "levels": by_level(graded),
    }


def pass_at(graded: pl.DataFrame, settings: Evaluate) -> Mapping[str, float | None]:
    """Return the unbiased pass@k for each k (as text), averaged over the prompts with at least k
    trials; None if there is no such prompt."""
    result: dict[str, float | None] = {}
    for k in settings.pass_at:
        estimates = pass_at_k(graded["correct"].to_numpy(), graded["trials"].to_numpy(), k)
        known = estimates[~np.isnan(estimates)]
        result[str(k)] = float(known.mean()) if len(known) else None
    return result


def by_level(graded: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Return the result of `by_part` for each level. With several sources, whose levels are not
    comparable, return it for each source and each level of a source (`math`, `math 3`)."""
    if graded["source"].n_unique() < 2:
        return by_part(graded.with_columns(part="level"))
    levels = graded.filter(pl.col("level") != "").with_columns(
        part=pl.format("{} {}", "source", "level")
    )
    return by_part(pl.concat([graded.with_columns(part="source"), levels]))


def by_part(graded: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Return the number of prompts, pass@1 and greedy accuracy for each value of `part`."""
    parts = (
        graded.group_by("part")
        .agg(
            pl.len().alias("num_prompts"),
            (pl.col("correct") / pl.col("trials")).mean().alias("pass_at_1"),
            pl.col("greedy").mean(),
        )
        .sort("part")
    )
    return {row.pop("part"): row for row in parts.to_dicts()}
