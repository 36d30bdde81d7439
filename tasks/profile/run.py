"""The stage `profile`: measure the policy's pass rate on every training prompt."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common import stage
from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.accounting.success import without_success
from tasks.common.artifacts import PROFILE, PROMPTS
from tasks.common.checksums import write_checked
from tasks.common.files import digest_file, rounded
from tasks.grading.graded import GradedRollouts, graded_rollouts, write_rollouts
from tasks.grading.grader import Grader
from tasks.grading.settings import Verify
from tasks.models.policy import read_policy
from tasks.profile.profile import profile_prompts, summarize
from tasks.profile.settings import ProfileSettings
from tasks.profile.sources import by_source, repetitions
from tasks.profile.stopping import Stopping
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts, sampling_cost

logger = logging.getLogger(__name__)


def main(run: stage.Stage) -> None:
    """Sample and grade rollouts of all training prompts; write the profile and its costs."""
    settings = run.section("profile", ProfileSettings)
    sampler = run.sections(SamplerSettings)
    layout = run.layout
    policy = read_policy(layout)
    prompts = PROMPTS.read(layout.prompts("train"))
    run.tracker.params(
        {
            "profile": asdict(settings),
            "sampling": asdict(sampler.sampling),
            "policy": policy.digest,
        }
    )
    run.tracker.dataset(
        "train", layout.prompts("train"), digest_file(layout.prompts("train")), "profile"
    )

    verify = run.section("verify", Verify)
    stored = StoredRollouts(
        prompts, policy, settings.num_samples, sampler, layout, cell="profile", greedy=False
    )
    profile, repeated, judge_flops = sample(stored, settings, verify, layout.profile)
    with Grader(verify) as grader:
        summary = summarize(profile) | {"verifiers": grader.versions(prompts["verifier"].unique())}
    summary["sources"] = by_source(prompts, profile, repeated)
    log_summary(summary, len(profile))
    if words := without_success(summary["outcomes"]):
        logger.warning("%s", words)
        run.tracker.tags({"mlflow.note.content": words})

    PROFILE.write(layout.profile / "profile.parquet", profile)
    noted = {"policy": policy.digest, "settings": asdict(settings)}
    write_checked(layout.profile / "summary.json", {**rounded(summary), **noted})
    costs = stored.costs()
    ledger = sampling_cost(costs, policy, "profile", charged=True)
    ledger.add("profile", **dict.fromkeys(ACCOUNTS, judge_flops))
    write_checked(layout.profile / "flops.json", ledger.as_dict())
    of = digest_file(layout.profile / "profile.parquet")
    seconds = {"profile": round(float(costs["seconds"].sum()), 3)}
    write_checked(layout.measured("profile"), {"of": of, "seconds": seconds})
    run.tracker.tags({"rollouts": stored.usage.summary})
    run.tracker.metrics(
        {
            "pass_rate_mean": summary["pass_rate_mean"],
            **stored.usage.metrics(),
            **{f"mixed_rate_{size}": rate for size, rate in summary["mixed_rate"].items()},
        }
    )
    run.tracker.artifact(layout.profile / "summary.json")


def sample(
    stored: StoredRollouts, settings: ProfileSettings, verify: Verify, folder: Path
) -> tuple[pl.DataFrame, pl.DataFrame, float]:
    """Sample and grade the rollouts in stages, and write them to `folder`/rollouts.parquet. Return
    the PROFILE table, the `repetitions`, and the FLOPs of judges."""
    stopping = Stopping(settings, len(stored.prompts))
    stored.narrow(stopping.is_open_P, stopping.samples)
    parts: list[tuple[pl.DataFrame, pl.DataFrame]] = []
    judged, go_on = stored.layout.judged, partial(next_stage, stopping, stored)
    with graded_rollouts(
        stored, verify, folder, greedy=False, judged=judged, go_on=go_on
    ) as graded:
        path = folder / "rollouts.parquet"
        write_rollouts(
            path,
            [graded],
            lambda part: parts.append((profile_prompts(part, stopping), repetitions(part))),
        )
    profile, repeated = map(pl.concat, zip(*parts, strict=True))
    return profile, repeated, graded.judge_flops


def next_stage(stopping: Stopping, stored: StoredRollouts, graded: GradedRollouts) -> bool:
    """End a stage. Request the next samples of the prompts that are still open, if there are any,
    and return whether there are."""
    passed_PN = graded.passed.reshape(len(stopping.is_open_P), -1)
    is_open = stopping.end_stage((passed_PN == 1).sum(axis=1), (passed_PN >= 0).sum(axis=1))
    if is_open:
        stored.narrow(stopping.is_open_P, stopping.samples)
        num, start = stopping.is_open_P.sum(), stopping.samples.start
        logger.info("prompts still open after %d samples: %d", start, num)
    return is_open


def log_summary(summary: Mapping[str, Any], num_prompts: int) -> None:
    """Log a summary of the prompts' difficulty."""
    logger.info(
        "%d prompts: mean pass rate %.3f, never solved %d, always solved %d; groups of 8 expected "
        "to be mixed: %.1f %%",
        num_prompts,
        summary["pass_rate_mean"],
        summary["never_solved"],
        summary["always_solved"],
        100 * summary["mixed_rate"]["8"],
    )
    for source, values in summary["sources"].items():
        logger.info(
            "%s: %d prompts, mean pass rate %.3f; never solved %.0f %%, always %.0f %%; prompts by "
            "number of successes: %s; the best constant answer (%s) is right for %.0f %%; "
            "truncated %.1f %%, repeated completions %.0f %%",
            source,
            values["num_prompts"],
            values["pass_rate_mean"],
            100 * values["never_solved_rate"],
            100 * values["always_solved_rate"],
            " ".join(map(str, values["successes"])),
            values["constant_answer"][:40],
            100 * values["constant_rate"],
            100 * values["truncated_rate"],
            100 * values["repeated_rate"],
        )
