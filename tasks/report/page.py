"""The page: tables and text in the template `page.html`, and data that its scripts draw. It is one
file, and makes no request to a network.

What policies wrote is data: it stands in the page as JSON in which no tag can begin, and the script
puts it on the screen as text. Should it ever get further, the page's policy runs no script but its
own, by their digests, and loads nothing from anywhere."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import polars as pl
from plotly.offline import get_plotlyjs

from tasks.report import budget, figures, prompts, rounds, tables
from tasks.report.charts import Chart
from tasks.report.drift import Drift
from tasks.report.evidence import Evidence
from tasks.report.leaderboard import Fits, Row
from tasks.report.origin import Origin
from tasks.report.paired import Paired
from tasks.report.transitions import transitions
from tasks.report.words import stale_words, verdict

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "rollouts.js")


def page(
    evidence: Evidence,
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    curves: pl.DataFrame,
    fits: Fits,
    paired: Paired,
    rollouts: Mapping[str, Any],
    origin: Origin,
    side_by_side: Sequence[rounds.Round] = (),
) -> str:
    """Return the whole page as HTML."""
    template = Template((HERE / "page.html").read_text())
    advices = budget.advise(fits)
    charts = all_charts(evidence, rows, summary, curves, fits, paired)
    charts |= rounds.charts(side_by_side, evidence)
    charts["budget"] = budget.chances(advices, figures.colours(evidence))
    words = {axis: [budget.advice_words(axis, a) for a in found] for axis, found in advices.items()}
    scripts = [get_plotlyjs(), *((HERE / name).read_text() for name in SCRIPTS)]
    return template.substitute(
        digests=" ".join(f"'sha256-{digest_of(script)}'" for script in scripts),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data=data({"charts": charts, "advice": words, "rollouts": rollouts}),
        headline=escape(summary["headline"]),
        verdict=escape(verdict(summary)),
        champion=champion_words(summary),
        facts=facts(evidence, origin),
        why=tables.why_table(origin.ran, origin.sampled),
        legend=figures.legend(evidence),
        rounds=rounds.section(side_by_side),
        leaderboard=tables.leaderboard_table(evidence, rows),
        differences=tables.differences_table(evidence, summary),
        seeds=tables.seeds_table(evidence, summary["recipes"]),
        advice=tables.advice_table(evidence, advices),
        reach=tables.reach_table(evidence, summary),
        bills=tables.bills_table(evidence, rows),
        decisions=tables.decisions_table(evidence),
        plans=tables.plans_table(evidence),
        forecast=tables.forecast_table(evidence, rows),
        stale=stale_boxes(evidence, summary["drift"]),
        drift=tables.drift_table(evidence, summary["drift"]),
        seconds=tables.seconds_table(evidence, rows),
        num_read=len(rollouts["prompts"]),
        num_test=rollouts["total"],
    )


def all_charts(
    evidence: Evidence,
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    curves: pl.DataFrame,
    fits: Fits,
    paired: Paired,
) -> dict[str, Chart]:
    """Return the charts by their places in the template."""
    hues = figures.colours(evidence)
    runs = {recipe: [run.name for run in evidence.seeds(recipe)] for recipe in hues}
    return {
        "accuracy": figures.accuracy(evidence, curves, fits),
        "steps": figures.over_steps(evidence),
        "differences": figures.differences(evidence, summary["recipes"]),
        "transitions": transitions(paired, runs, hues),
        "parts": figures.compute_parts(evidence, rows),
        "classes": prompts.tokens_by_class(evidence, rows),
        "histograms": prompts.histograms(evidence),
        "calibrations": figures.calibrations(evidence),
        "levels": figures.by_level(evidence),
    }


def data(value: Mapping[str, Any]) -> str:
    """Return JSON for a script element: without `<`, no tag and no comment can begin in it."""
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def finite(value: Any) -> Any:
    """Return a JSON-like value with None for what is no finite number."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    is_number = not isinstance(value, float) or abs(value) < float("inf")
    return value if is_number else None


def digest_of(script: str) -> str:
    """Return the digest by which the page's policy knows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def champion_words(summary: Mapping[str, Any]) -> str:
    """Return which policy to keep, and why."""
    champion = summary["champion"]
    name = f"{champion['recipe']}/{champion['seed']}" if champion else "none"
    return f"<b>Champion: {escape(name)}.</b> {escape(summary['why'])}."


def facts(evidence: Evidence, origin: Origin) -> str:
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
        **origin.made,
    }
    return "".join(
        f"<div><dt>{name}</dt><dd>{escape(words)}</dd></div>" for name, words in entries.items()
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
