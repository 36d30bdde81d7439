"""The page: tables and text in the template `page.html`, and data that its scripts draw. It is a
single file that makes no network requests; it loads only `measured.js` and `external.js` beside
it, if they exist.

The output of policies is data: the page contains it as JSON in which no tag can begin, and the
script displays it as text. As a second barrier, the page's content security policy allows only its
own scripts, by their digests and a nonce, and forbids all other requests."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from tasks.report.curves import amount
from tasks.report.evidence import Evidence
from tasks.report.results import Results, name_of, stale_runs
from tasks.report.views import budget, figures, prompts, tables

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "rollouts.js")


def page(results: Results, rollouts: Mapping[str, Any]) -> str:
    advices, limit = budget.advise(results.fits), results.evidence.budget
    words = {
        axis: [results.evidence.unranked or budget.advice_words(axis, one) for one in by_budget]
        for axis, by_budget in advices.items()
    }
    charts = {  # by place in the template
        "accuracy": figures.accuracy(results),
        "tested": figures.tested(results),
        "steps": figures.over_steps(results),
        "transitions": prompts.transitions(results),
        "classes": prompts.tokens_by_class(results),
        "histograms": prompts.histograms(results),
        "levels": figures.by_level(results),
        "budget": budget.chances(advices, results.colours),
    }
    scripts = [get_plotlyjs(), *((HERE / name).read_text() for name in SCRIPTS)]
    account = limit.account if limit else None
    shown = data({"charts": charts, "account": account, "advice": words, "rollouts": rollouts})
    return Template((HERE / "page.html").read_text()).substitute(
        title=escape(title(results.evidence)),
        nonce=digest_of(shown),  # markup in the data cannot contain it
        digests=" ".join(f"'sha256-{digest_of(script)}'" for script in scripts),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data=shown,
        headline=re.sub("`([^`]+)`", r"<code>\1</code>", escape(results.summary["headline"])),
        champion=champion_words(results.summary),
        facts=facts(results.evidence),
        legend=figures.legend(results.colours),
        leaderboard=tables.leaderboard_table(results),
        differences=tables.captioned_table(results, tables.differences(results.summary)),
        seeds=tables.seeds_table(results),
        points=tables.captioned_table(results, tables.points_at_shares(results.summary)),
        bills=tables.bills_table(results),
        profiled=tables.profiled_table(results),
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


def title(evidence: Evidence) -> str:
    """Return the policy and its size, the sources of the test prompts, and the budget."""
    policy, limit = evidence.policy, evidence.budget
    size = f"{policy['num_parameters'] / 1e6:,.2f}M parameters"
    each = f"{amount(limit.account, limit.amount)} per recipe" if limit else "no equal budget"
    return f"{policy['source']} ({size}) on {', '.join(evidence.sources)}, {each}"


def champion_words(summary: Mapping[str, Any]) -> str:
    champion = summary["champion"]
    name = name_of(champion) if champion else "none"
    return f"<b>Champion: {escape(name)}.</b> {escape(summary['why'])}."


def facts(evidence: Evidence) -> str:
    """Return the policy, the profile, the test set and the seeds, in one line."""
    policy, base, profile = evidence.policy, evidence.baseline, evidence.profile
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in evidence.trained}))
    return escape(
        f"{policy['architecture']} {policy['digest'][:8]}. Profile: {len(profile):,} prompts, "
        f"{profile['num_samples'].sum():,} rollouts, "
        f"{evidence.profile_flops['tokens']['profile']:,.0f} tokens. Tested on "
        f"{base['num_prompts']:,} prompts, {base['num_samples']} samples each. Seeds: {seeds}."
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
