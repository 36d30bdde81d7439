"""The rounds of an experiment side by side. A later round starts from a policy that the round
before it trained: what it reached stands on everything that was spent before.

Of each round one policy is kept: the one that the next round started from; of the last round its
champion, or where there is none its candidate. Its bill is that of the leaderboard: the profiling
is on it where the recipe reads the profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import polars as pl

from tasks.common.artifacts import PROFILE, Layout
from tasks.common.files import ArtifactError, digest_file, read_json
from tasks.common.remedy import remedy
from tasks.common.sealed import read_sealed
from tasks.report.charts import Chart, Trace, bars, chart, dots, line, unit, variant
from tasks.report.curves import COMPARED
from tasks.report.evidence import Evidence
from tasks.report.figures import axis_words, colours
from tasks.report.leaderboard import Row
from tasks.report.tables import html_table, unit_words
from tasks.report.transitions import CLASSES, class_of

KINDS = ("never solved", "learnable", "always solved", "not known")


@dataclass(frozen=True)
class Round:
    """One round: the metrics of its initial policy, its leaderboard, the row of the policy that was
    kept and why, and the profile. `source` is what its initial policy was made from."""

    number: int
    source: str
    initial: Mapping[str, Any]
    rows: Sequence[Row]
    kept: Row
    why: str
    profile: pl.DataFrame

    @property
    def kept_name(self) -> str:
        return f"{self.kept['recipe']}/{self.kept['seed']}"


def read_rounds(
    before: Sequence[Path], evidence: Evidence, rows: Sequence[Row], summary: Mapping[str, Any]
) -> list[Round]:
    """Return the rounds whose data roots are `before`, in order, and this one; nothing where there
    is only this one."""
    if not before:
        return []
    layouts = [Layout(root) for root in before]
    cards = [*(read_sealed(layout.policy_card) for layout in layouts), evidence.policy]
    found = [
        read_round(number, layout, card, cell_of(following["source"]))
        for number, (layout, (card, following)) in enumerate(
            zip(layouts, pairwise(cards), strict=True), start=1
        )
    ]
    chosen = summary["champion"] or summary["candidate"]
    why = "champion" if summary["champion"] else "candidate, no champion"
    kept = row_of(rows, chosen["recipe"], chosen["seed"], "this round")
    last = Round(
        len(found) + 1,
        str(evidence.policy["source"]),
        summary["initial"],
        rows,
        kept,
        why,
        evidence.profile,
    )
    return [*found, last]


def read_round(
    number: int, layout: Layout, card: Mapping[str, Any], cell: tuple[str, int]
) -> Round:
    """Read an earlier round, of which the policy of `cell` was kept."""
    summary = read_sealed(layout.report / "summary.json")
    rows = read_rows(layout.report / "leaderboard.json", summary)
    champion = summary["champion"]
    is_champion = champion and (champion["recipe"], champion["seed"]) == cell
    return Round(
        number,
        str(card["source"]),
        summary["initial"],
        rows,
        row_of(rows, *cell, str(layout.report)),
        "champion" if is_champion else "by name",
        PROFILE.read(layout.profile / "profile.parquet"),
    )


def read_rows(path: Path, summary: Mapping[str, Any]) -> list[Row]:
    """Read a leaderboard, whose digest its report's summary holds."""
    if digest_file(path) != summary["digests"][path.name]:
        raise ArtifactError(f"{path} is damaged, or was edited. {remedy(path)}")
    rows: list[Row] = read_json(path)
    return rows


def cell_of(source: str) -> tuple[str, int]:
    """Return recipe and seed of the policy in `.../runs/RECIPE/SEED/train/policy`."""
    parts = Path(source).parts[-5:]
    if len(parts) < 5 or (parts[0], *parts[3:]) != ("runs", "train", "policy"):
        raise ArtifactError(
            f"the policy {source} was trained by no round: run the stages in the rounds' folders "
            "by python -m flows.pipeline --rounds"
        )
    return parts[1], int(parts[2])


def row_of(rows: Sequence[Row], recipe: str, seed: int, where: str) -> Row:
    """Return the leaderboard's row of a cell."""
    for row in rows:
        if (row["recipe"], row["seed"]) == (recipe, seed):
            return row
    raise ArtifactError(
        f"{recipe}/{seed}, from which the next round started, is not on the leaderboard of "
        f"{where}; bring the rounds up to date: python -m flows.pipeline --rounds"
    )


def cumulative(rounds: Sequence[Round], account: str) -> list[float]:
    """Return the compute of the kept policies up to and including each round."""
    return list(accumulate(one.kept[f"flops_{account}"]["total"] for one in rounds))


def kinds(profile: pl.DataFrame) -> list[int]:
    """Return how many prompts are of each of KINDS."""
    classes = class_of(profile["pass_rate"].drop_nulls())
    never, always = int((classes == 0).sum()), int((classes == len(CLASSES) - 1).sum())
    return [never, len(classes) - never - always, always, len(profile) - len(classes)]


def summary_of(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return what `summary.json` says of the rounds."""
    spent = {account: cumulative(rounds, account) for account in COMPARED}
    keys = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy")
    return [
        {
            "round": one.number,
            "source": one.source,
            "initial": {key: one.initial[key] for key in keys},
            "kept": {
                "recipe": one.kept["recipe"],
                "seed": one.kept["seed"],
                "why": one.why,
                **{key: one.kept[key] for key in keys},
            },
            "flops": {
                account: {
                    "profile": one.kept[f"flops_{account}"]["profile"],
                    "total": one.kept[f"flops_{account}"]["total"],
                    "cumulative": spent[account][place],
                }
                for account in COMPARED
            },
            "prompts": dict(zip(KINDS, kinds(one.profile), strict=True)),
        }
        for place, one in enumerate(rounds)
    ]


def section(rounds: Sequence[Round]) -> str:
    """Return the section of the page; nothing where there are no rounds to compare."""
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
    """Return where every round started and what it reached."""
    body = [
        [
            str(one.number),
            one.source if place == 0 else rounds[place - 1].kept_name,
            accuracy_words(one.initial),
            f"{one.kept_name} ({one.why})",
            accuracy_words(one.kept),
        ]
        for place, one in enumerate(rounds)
    ]
    return html_table(["round", "starts from", "pass@1 before", "kept", "pass@1 after"], body)


def bills_table(rounds: Sequence[Round]) -> str:
    """Return what the kept policy of every round cost, and all rounds so far, in one unit."""
    spent = {account: cumulative(rounds, account) for account in COMPARED}
    size, name = unit(max(total for totals in spent.values() for total in totals))
    body = [
        [
            str(one.number),
            one.kept_name,
            *(bill_words(one.kept[f"flops_{account}"], size) for account in COMPARED),
            *(f"{spent[account][place] / size:.3g}" for account in COMPARED),
        ]
        for place, one in enumerate(rounds)
    ]
    headers = ["round", "kept", *COMPARED, *(f"all {account}" for account in COMPARED)]
    return f'<p class="note">{unit_words(name)}.</p>' + html_table(headers, body)


def accuracy_words(found: Mapping[str, Any]) -> str:
    """Return pass@1 with its interval."""
    low, high = 100 * found["pass_at_1_low"], 100 * found["pass_at_1_high"]
    return f"{found['pass_at_1']:.1%} ({low:.1f} to {high:.1f})"


def bill_words(bill: Mapping[str, float], size: float) -> str:
    """Return the total of a bill in units of `size`, and the profiling's part of it."""
    return f"{bill['total'] / size:.3g} ({bill['profile'] / size:.3g})"


def kinds_table(rounds: Sequence[Round]) -> str:
    """Return how many training prompts were never, sometimes and always solved in each profile."""
    body = []
    for one in rounds:
        counts = kinds(one.profile)
        shares = [f"{count:,} ({count / sum(counts):.0%})" for count in counts]
        graded = one.profile["pass_rate"].drop_nulls().to_numpy()
        body.append([str(one.number), *shares, f"{graded.mean():.1%}" if len(graded) else "–"])
    return html_table(["round", *KINDS, "mean pass rate"], body)


def moves_table(rounds: Sequence[Round]) -> str:
    """Return what became, from each round to the next, of the prompts of each kind."""
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


def kind_places(rates: pl.Series) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the places of pass rates in KINDS."""
    classes = class_of(rates)
    return np.where(classes == 0, 0, np.where(classes == len(CLASSES) - 1, 2, 1))


def charts(rounds: Sequence[Round], evidence: Evidence) -> dict[str, Chart]:
    """Return the charts of the section by their places in it; none where there are no rounds."""
    if not rounds:
        return {}
    variants = {account: accuracy_over(rounds, evidence, account) for account in COMPARED}
    return {
        "rounds": chart("test pass@1 over the compute of all rounds", variants),
        "round_rates": chart(
            "training prompts by pass rate in the profile of each round", {"rates": rates(rounds)}
        ),
    }


def accuracy_over(rounds: Sequence[Round], evidence: Evidence, account: str) -> dict[str, Any]:
    """Return test pass@1 over the compute of all rounds so far: the kept policies, and every
    recipe."""
    spent = [0.0, *cumulative(rounds, account)]
    totals = [
        start + row[f"flops_{account}"]["total"]
        for start, one in zip(spent, rounds, strict=False)
        for row in one.rows
    ]
    size, name = unit(max(totals))
    kept = [rounds[0].initial, *(one.kept for one in rounds)]
    ys = [found["pass_at_1"] for found in kept]
    words = ["initial policy", *(f"round {one.number}: {one.kept_name}" for one in rounds)]
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
    hues = colours(evidence)
    traces: list[Trace] = [trace]
    for start, one in zip(spent, rounds, strict=False):
        for row in one.rows:
            if row["recipe"] in hues:
                cell = f"round {one.number}: {row['recipe']}/{row['seed']}"
                xs = [(start + row[f"flops_{account}"]["total"]) / size]
                hover = f"%{{y:.1%}} with %{{x:,.4~g}} {name}"
                index, recipe = hues[row["recipe"]], row["recipe"]
                traces.append(dots(cell, index, xs, [row["pass_at_1"]], hover, group=recipe))
    x_words = f"{axis_words(account, name)}, all rounds so far"
    return variant(traces, x_words, "test pass@1", percent="y", xaxis_rangemode="tozero")


def rates(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the number of training prompts in each class of pass rates, a bar a round."""
    traces = []
    for place, one in enumerate(rounds, start=1):
        classes = class_of(one.profile["pass_rate"].drop_nulls())
        counts = np.bincount(classes, minlength=len(CLASSES)).tolist()
        share = 0.3 + 0.7 * place / len(rounds)
        name = f"round {one.number}"
        hover = "%{y:,} prompts of pass rate %{x}, %{fullData.name}"
        traces.append(bars(name, list(CLASSES), counts, f"@c0:{share:g}", hover))
    words = "pass rate in the profile"
    return variant(
        traces, words, "prompts", barmode="group", xaxis_type="category", showlegend=True
    )
