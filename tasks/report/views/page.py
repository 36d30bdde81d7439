"""The page: tables and text in the template `page.html`, and data that its scripts draw. It is a
single file that makes no network requests.

The output of policies is data: the page contains it as JSON in which no tag can begin, and the
script displays it as text. As a second barrier, the page's content security policy allows only its
own scripts, by their digests, and forbids all requests."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from tasks.report.evidence import Evidence
from tasks.report.results import Results, name_of, stale_runs
from tasks.report.rounds import Round
from tasks.report.views import budget, figures, prompts, tables
from tasks.report.views import rounds as rounds_section

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "rollouts.js")


def page(results: Results, rollouts: Mapping[str, Any], rounds: Sequence[Round] = ()) -> str:
    advices = budget.advise(results.fits)
    words = {axis: [budget.advice_words(axis, a) for a in found] for axis, found in advices.items()}
    charts = {  # by place in the template
        "accuracy": figures.accuracy(results),
        "steps": figures.over_steps(results),
        "differences": figures.differences(results),
        "transitions": prompts.transitions(results),
        "parts": figures.compute_parts(results),
        "classes": prompts.tokens_by_class(results),
        "histograms": prompts.histograms(results),
        "calibrations": figures.calibrations(results),
        "levels": figures.by_level(results),
        **rounds_section.charts(rounds, results.colours),
        "budget": budget.chances(advices, results.colours),
    }
    scripts = [get_plotlyjs(), *((HERE / name).read_text() for name in SCRIPTS)]
    return Template((HERE / "page.html").read_text()).substitute(
        digests=" ".join(f"'sha256-{digest_of(script)}'" for script in scripts),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data=data({"charts": charts, "advice": words, "rollouts": rollouts}),
        headline=re.sub("`([^`]+)`", r"<code>\1</code>", escape(results.summary["headline"])),
        champion=champion_words(results.summary),
        facts=facts(results.evidence),
        legend=figures.legend(results.colours),
        rounds=rounds_section.section(rounds),
        leaderboard=tables.leaderboard_table(results),
        differences=tables.captioned_table(results, tables.differences(results.summary)),
        seeds=tables.seeds_table(results),
        points=tables.captioned_table(results, tables.points_at_shares(results.summary)),
        bills=tables.bills_table(results),
        decisions=tables.decisions_table(results),
        plans=tables.plans_table(results),
        forecast=tables.forecast_table(results),
        stale=stale_boxes(results),
        drift=tables.drift_table(results),
        num_read=len(rollouts["prompts"]),
        num_test=rollouts["total"],
    )


def data(value: Mapping[str, Any]) -> str:
    """Return JSON for a script element. It has no `<`, so no tag or comment can begin in it."""
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def finite(value: Any) -> Any:
    """Return a JSON-like value with None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    is_number = not isinstance(value, float) or abs(value) < float("inf")
    return value if is_number else None


def digest_of(script: str) -> str:
    """Return the base64 SHA-256 digest by which the page's security policy allows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def champion_words(summary: Mapping[str, Any]) -> str:
    champion = summary["champion"]
    name = name_of(champion) if champion else "none"
    return f"<b>Champion: {escape(name)}.</b> {escape(summary['why'])}."


def facts(evidence: Evidence) -> str:
    """Return facts about policy, profile and test set as HTML, one line each."""
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


def stale_boxes(results: Results) -> str:
    """Return a warning for each run with a stale profile, or a sentence that there is none."""
    warnings = stale_runs(results)
    if not warnings:
        return (
            "<p>In the last pass of every run the profile still describes the policy well "
            "enough.</p>"
        )
    return "".join(f'<div class="box warning">{escape(words)}.</div>' for _, words in warnings)
