"""The page's section on the rounds of an experiment: its tables and charts."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from tasks.report.curves import COMPARED, axis_words, unit
from tasks.report.paired import CLASSES, class_of
from tasks.report.results import name_of
from tasks.report.rounds import KINDS, Round, cumulative, kind_places, kinds
from tasks.report.views.charts import Chart, Trace, bars, chart, dots, line, variant
from tasks.report.views.tables import html_table, unit_words


def section(rounds: Sequence[Round]) -> str:
    """Return the section of the page; an empty string if there are no rounds to compare."""
    if not rounds:
        return ""
    template = Template(Path(__file__).with_name("rounds.html").read_text())
    return template.substitute(
        number=rounds[-1].number,
        table=rounds_table(rounds),
        bills=bills_table(rounds),
        kinds=kinds_table(rounds),
        moves=moves_table(rounds),
    )


def rounds_table(rounds: Sequence[Round]) -> str:
    body = [
        [
            str(one.number),
            one.source if place == 0 else name_of(rounds[place - 1].kept),
            accuracy_words(one.initial),
            f"{name_of(one.kept)} ({one.why})",
            accuracy_words(one.kept),
        ]
        for place, one in enumerate(rounds)
    ]
    return html_table(["round", "starts from", "pass@1 before", "kept", "pass@1 after"], body)


def bills_table(rounds: Sequence[Round]) -> str:
    """Return a table of the cost of each round's kept policy, and of all rounds so far."""
    spent = {account: cumulative(rounds, account) for account in COMPARED}
    size, name = unit(max(total for totals in spent.values() for total in totals))
    body = [
        [
            str(one.number),
            name_of(one.kept),
            *(bill_words(one.kept[f"flops_{account}"], size) for account in COMPARED),
            *(f"{spent[account][place] / size:.3g}" for account in COMPARED),
        ]
        for place, one in enumerate(rounds)
    ]
    headers = ["round", "kept", *COMPARED, *(f"all {account}" for account in COMPARED)]
    return f'<p class="note">{unit_words(name)}.</p>' + html_table(headers, body)


def accuracy_words(found: Mapping[str, Any]) -> str:
    low, high = 100 * found["pass_at_1_low"], 100 * found["pass_at_1_high"]
    return f"{found['pass_at_1']:.1%} ({low:.1f} to {high:.1f})"


def bill_words(bill: Mapping[str, float], size: float) -> str:
    """Return the total of a bill in units of `size` FLOPs, with the part for profiling."""
    return f"{bill['total'] / size:.3g} ({bill['profile'] / size:.3g})"


def kinds_table(rounds: Sequence[Round]) -> str:
    """Return a table of the prompts never, sometimes and always solved in each round's profile."""
    body = []
    for one in rounds:
        counts = kinds(one.profile)
        shares = [f"{count:,} ({count / sum(counts):.0%})" for count in counts]
        graded = one.profile["pass_rate"].drop_nulls().to_numpy()
        body.append([str(one.number), *shares, f"{graded.mean():.1%}" if len(graded) else "–"])
    return html_table(["round", *KINDS, "mean pass rate"], body)


def moves_table(rounds: Sequence[Round]) -> str:
    """Return a table of how many prompts changed kind from each round to the next."""
    body = []
    for before, after in pairwise(rounds):
        rates = before.profile.select("prompt_id", "pass_rate").join(
            after.profile.select("prompt_id", "pass_rate"), on="prompt_id", suffix="_after"
        )
        known = rates.drop_nulls()
        places = [kind_places(known[name]) for name in ("pass_rate", "pass_rate_after")]
        for place, kind in enumerate(KINDS[:3]):
            became = np.bincount(places[1][places[0] == place], minlength=3)
            body.append([f"{before.number} → {after.number}", kind, *(f"{n:,}" for n in became)])
    heads = [f"now {kind}" for kind in KINDS[:3]]
    return html_table(["rounds", "was", *heads], body)


def charts(rounds: Sequence[Round], colours: Mapping[str, int]) -> dict[str, Chart]:
    """Return the charts of the section, keyed by place in the page; none without rounds."""
    if not rounds:
        return {}
    variants = {account: accuracy_over(rounds, colours, account) for account in COMPARED}
    return {
        "rounds": chart("test pass@1 over the compute of all rounds", variants),
        "round_rates": chart(
            "training prompts by pass rate in the profile of each round", {"rates": rates(rounds)}
        ),
    }


def accuracy_over(
    rounds: Sequence[Round], colours: Mapping[str, int], account: str
) -> dict[str, Any]:
    """Return test pass@1 against the compute of all rounds so far, for the kept policies and for
    every recipe."""
    spent = [0.0, *cumulative(rounds, account)]
    totals = [
        start + row[f"flops_{account}"]["total"]
        for start, one in zip(spent, rounds, strict=False)
        for row in one.rows
    ]
    size, name = unit(max(totals))
    kept = [rounds[0].initial, *(one.kept for one in rounds)]
    ys = [found["pass_at_1"] for found in kept]
    words = ["initial policy", *(f"round {one.number}: {name_of(one.kept)}" for one in rounds)]
    hover = f"%{{customdata}}: %{{y:.1%}} with %{{x:,.4~g}} {name}"
    trace = line("kept", 0, [flops / size for flops in spent], ys, hover)
    error = {
        "type": "data",
        "symmetric": False,
        "array": [found["pass_at_1_high"] - y for found, y in zip(kept, ys, strict=True)],
        "arrayminus": [y - found["pass_at_1_low"] for found, y in zip(kept, ys, strict=True)],
        "color": "@soft",
    }
    trace |= {
        "mode": "lines+markers",
        "line": {"color": "@soft", "width": 2},
        "error_y": error,
        "customdata": [escape(word) for word in words],
    }
    traces: list[Trace] = [trace]
    for start, one in zip(spent, rounds, strict=False):
        for row in one.rows:
            if row["recipe"] in colours:
                cell = f"round {one.number}: {name_of(row)}"
                xs = [(start + row[f"flops_{account}"]["total"]) / size]
                hover = f"%{{y:.1%}} with %{{x:,.4~g}} {name}"
                index, recipe = colours[row["recipe"]], row["recipe"]
                traces.append(dots(cell, index, xs, [row["pass_at_1"]], hover, group=recipe))
    x_words = f"{axis_words(account, name)}, all rounds so far"
    return variant(traces, x_words, "test pass@1", percent="y", xaxis_rangemode="tozero")


def rates(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the variant of a chart that counts each round's training prompts by pass rate."""
    traces = []
    for place, one in enumerate(rounds, start=1):
        classes = class_of(one.profile["pass_rate"].drop_nulls())
        counts = np.bincount(classes, minlength=len(CLASSES)).tolist()
        share = 0.3 + 0.7 * place / len(rounds)
        name = f"round {one.number}"
        hover = "%{y:,} prompts of pass rate %{x}, %{fullData.name}"
        traces.append(bars(name, list(CLASSES), counts, f"@c0:{share:g}", hover))
    words = "pass rate in the profile"
    return variant(traces, words, "prompts", barmode="group", xaxis_type="category")
