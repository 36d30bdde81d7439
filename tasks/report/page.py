"""The page: figures, tables and text in the template `page.html`. It is one file, makes no request
to a network, and has no time stamp."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import polars as pl

from tasks.report import figures, tables
from tasks.report.drift import Drift, groups_of, passes_of
from tasks.report.evidence import Evidence
from tasks.report.leaderboard import COMPARED, Fits, Row
from tasks.report.words import stale_words, verdict


def page(
    evidence: Evidence,
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    curves: pl.DataFrame,
    fits: Fits,
) -> str:
    """Return the whole page as HTML."""
    template = Template((Path(__file__).parent / "page.html").read_text())
    return template.substitute(
        verdict=escape(verdict(summary)),
        champion=champion_words(summary),
        facts=facts(evidence),
        legend=figures.legend(evidence),
        level_legend=figures.legend(evidence, ("initial policy", "background:var(--initial)")),
        histogram_legend=figures.legend(evidence, ("left out", "background:var(--left-out)")),
        leaderboard=tables.leaderboard_table(evidence, rows),
        differences=tables.differences_table(evidence, summary),
        seeds=tables.seeds_table(evidence, summary["recipes"]),
        **{f"accuracy_{a}": figures.accuracy_over(evidence, curves, fits, a) for a in COMPARED},
        **{f"parts_{a}": figures.compute_parts(evidence, rows, a) for a in COMPARED},
        reach=tables.reach_table(evidence, summary),
        signal=figures.signal_over_steps(evidence),
        bills=tables.bills_table(evidence, rows),
        histograms=histograms(evidence),
        decisions=tables.decisions_table(evidence),
        plans=tables.plans_table(evidence),
        forecast=tables.forecast_table(evidence, rows),
        stale=stale_boxes(evidence, summary["drift"]),
        calibrations=calibrations(evidence),
        drift=tables.drift_table(evidence, summary["drift"]),
        levels=figures.by_level(evidence),
        seconds=tables.seconds_table(evidence, rows),
    )


def champion_words(summary: Mapping[str, Any]) -> str:
    """Return which policy to keep, and why."""
    champion = summary["champion"]
    name = f"{champion['recipe']}/{champion['seed']}" if champion else "none"
    return f"<b>Champion: {escape(name)}.</b> {escape(summary['why'])}."


def facts(evidence: Evidence) -> str:
    """Return what was trained, profiled and tested, a line each."""
    policy = evidence.policy
    base = evidence.baseline
    profile = evidence.profile
    tokens = evidence.profile_flops["tokens"]["profile"]
    seeds = sorted({run.seed for run in evidence.trained})
    entries = {
        "policy": f"{policy['architecture']}, {policy['num_parameters']:,} parameters, "
        f"digest {policy['digest'][:8]}",
        "profiled": f"{len(profile):,} prompts, {profile['num_samples'].sum():,} rollouts, "
        f"{tokens:,.0f} tokens",
        "tested on": f"{base['num_prompts']:,} prompts, {base['num_samples']} samples each",
        "seeds": ", ".join(map(str, seeds)),
    }
    return "".join(
        f"<div><dt>{name}</dt><dd>{escape(words)}</dd></div>" for name, words in entries.items()
    )


def histograms(evidence: Evidence) -> str:
    """Return one histogram per recipe."""
    shown = [
        (plan.recipe, figures.profile_histogram(evidence, plan)) for plan in evidence.first_plans
    ]
    return "".join(
        f"<figure><h3>{tables.mark(evidence, name)}</h3>{picture}</figure>"
        for name, picture in shown
    )


def stale_boxes(evidence: Evidence, drifts: Mapping[str, Drift]) -> str:
    """Return a warning for each run whose profile is stale, or a sentence that there is none."""
    warnings = [
        stale_words(
            run.name, drifts[run.name], reads_profile=evidence.plan(run.recipe).reads_profile
        )
        for run in evidence.trained
        if drifts[run.name]["stale"]
    ]
    if not warnings:
        return (
            "<p>In the last pass of every run the profile still describes the policy well "
            "enough.</p>"
        )
    return "".join(f'<div class="box warning">{escape(words)}.</div>' for words in warnings)


def calibrations(evidence: Evidence) -> str:
    """Return a calibration figure for each recipe, over the groups of all its seeds."""
    shown = []
    for plan in evidence.first_plans:
        runs = evidence.seeds(plan.recipe)
        passes = passes_of(
            pl.concat([groups_of(run.steps, run.rollouts, evidence.profile) for run in runs])
        )
        if passes:
            picture = figures.calibration(
                passes, figures.colours(evidence)[plan.recipe], plan.recipe
            )
            shown.append(f"<figure><h3>{tables.mark(evidence, plan.recipe)}</h3>{picture}</figure>")
    return "".join(shown) or "<p>No training step was made.</p>"
