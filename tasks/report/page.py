"""The page: figures, tables and words put into `page.html`. One file, no request to anywhere, no time stamp."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import polars as pl

from tasks.report import figures, tables
from tasks.report.evidence import Evidence
from tasks.report.leaderboard import Row
from tasks.report.words import verdict


def page(evidence: Evidence, rows: Sequence[Row], summary: Mapping[str, Any], curves: pl.DataFrame) -> str:
    """The whole page as HTML."""
    template = Template((Path(__file__).parent / "page.html").read_text())
    return template.substitute(
        verdict=escape(verdict(summary)),
        champion=champion_words(summary),
        facts=facts(evidence),
        legend=figures.legend(evidence),
        level_legend=figures.legend(evidence, ("initial policy", "background:var(--initial)")),
        histogram_legend=figures.legend(evidence, ("left out", "background:var(--left-out)")),
        leaderboard=tables.leaderboard_table(evidence, rows),
        seeds=tables.seeds_table(evidence, summary["recipes"]),
        accuracy_charged=figures.accuracy_over(evidence, curves, "charged"),
        accuracy_executed=figures.accuracy_over(evidence, curves, "executed"),
        signal=figures.signal_over_steps(evidence),
        parts_charged=figures.compute_parts(evidence, rows, "charged"),
        parts_executed=figures.compute_parts(evidence, rows, "executed"),
        bills=tables.bills_table(evidence, rows),
        histograms=histograms(evidence),
        decisions=tables.decisions_table(evidence),
        plans=tables.plans_table(evidence),
        forecast=tables.forecast_table(evidence, rows),
        levels=figures.by_level(evidence),
        seconds=tables.seconds_table(evidence, rows),
    )


def champion_words(summary: Mapping[str, Any]) -> str:
    """Which policy to keep, and why."""
    champion = summary["champion"]
    name = f"{champion['recipe']}/{champion['seed']}" if champion else "none"
    return f"<b>Champion: {escape(name)}.</b> {escape(summary['why'])}."


def facts(evidence: Evidence) -> str:
    """What was trained, on what, and tested on what, in a line each."""
    policy, base, profile = evidence.policy, evidence.baseline, evidence.profile
    tokens = evidence.profile_flops["tokens"]["profile"]
    seeds = sorted({run.seed for run in evidence.trained})
    entries = {
        "policy": f"{policy['architecture']}, {policy['num_parameters']:,} parameters, digest {policy['digest'][:8]}",
        "profiled": f"{len(profile):,} prompts, {profile['num_samples'].sum():,} rollouts, {tokens:,.0f} tokens",
        "tested on": f"{base['num_prompts']:,} prompts, {base['num_samples']} samples each",
        "seeds": ", ".join(map(str, seeds)),
    }
    return "".join(f"<div><dt>{name}</dt><dd>{escape(words)}</dd></div>" for name, words in entries.items())


def histograms(evidence: Evidence) -> str:
    """One histogram a recipe."""
    shown = [(plan.recipe, figures.profile_histogram(evidence, plan)) for plan in evidence.plans]
    return "".join(f"<figure><h3>{tables.mark(evidence, name)}</h3>{picture}</figure>" for name, picture in shown)
