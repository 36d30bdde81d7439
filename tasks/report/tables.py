"""The tables of the report, as text for a terminal and as HTML. The numbers come from
`leaderboard`."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import polars as pl

from tasks.common.ledger import ACCOUNTS
from tasks.report.budget import LADDER, Advice, amount
from tasks.report.charts import css, flops_words, unit
from tasks.report.curves import COMPARED
from tasks.report.drift import Drift
from tasks.report.evidence import Evidence, RecipePlan
from tasks.report.figures import PART_WORDS, colours
from tasks.report.leaderboard import Row
from tasks.report.paired import Difference
from tasks.report.words import points_words

# columns of the leaderboard
HEADERS = (
    "recipe",
    "seed",
    "pass@1",
    "95 % interval",
    "greedy",
    "rollouts",
    *COMPARED,
    "seconds",
)
# above the differences
DIFFERENCES = (
    "Differences of pass@1 in points, paired by test prompt (95 % intervals are over {resampled}):"
)


def text_table(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """Return the leaderboard for a terminal with notes on its columns, and below it the paired
    differences."""
    size, unit_name = flops_unit(rows)
    headers, *differences = difference_cells(summary)
    lines = [
        *aligned([HEADERS, *(leader_cells(row, size) for row in rows)]),
        "",
        unit_words(unit_name),
        f"initial policy: pass@1 {rows[0]['pass_at_1_initial']:.1%}, greedy "
        f"{rows[0]['greedy_initial']:.1%}",
        "* profiling included (charged to recipes that read the profile); validation and "
        "evaluation are not",
        "",
        DIFFERENCES.format(resampled=resampled(summary)),
        "",
        *aligned([headers, *differences]),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n\n"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal: the headers, a rule, and the rows."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            pad(cell, width, column)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def pad(cell: str, width: int, column: int) -> str:
    """Return the cell padded: names align left, numbers right."""
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def difference_cells(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the headers and a row for each recipe, the best first: by how many points its pass@1
    is above that of the reference, of the champion (if there is one) and of the initial policy."""
    champion = summary["champion"]
    headers = {"reference": f"over {summary['reference']}"}
    if champion:
        headers["champion"] = f"over the champion {champion['recipe']}/{champion['seed']}"
    headers["initial"] = "over the initial policy"
    recipes = summary["recipes"]
    ranked = sorted(recipes, key=lambda name: -recipes[name]["differences"]["initial"]["mean"])
    body = [
        (name, *(difference_words(recipes[name]["differences"][key]) for key in headers))
        for name in ranked
    ]
    return [("recipe", *headers.values()), *body]


def difference_words(found: Difference | None) -> str:
    """Return a difference in points with its interval; a dash where there is none."""
    return "–" if found is None else f"{points(found['mean'], '+')} ({points_words(found)})"


def resampled(summary: Mapping[str, Any]) -> str:
    """Return what the intervals of the differences are over."""
    words = {recipe["differences"]["initial"]["over"] for recipe in summary["recipes"].values()}
    return str(words.pop())


def flops_unit(rows: Sequence[Row]) -> tuple[float, str]:
    """Return the size and the name of one unit for the compute of all rows."""
    return unit(max(row[f"flops_{account}"]["total"] for row in rows for account in COMPARED))


def unit_words(name: str) -> str:
    """Return what stands in the columns of compute."""
    return f"{', '.join(COMPARED)}: compute in {name}, by the rule of each account"


def leader_cells(row: Row, size: float) -> tuple[str, ...]:
    """Return the cells of a leaderboard row, in the order of HEADERS; compute in units of
    `size`."""
    star = "*" if row["reads_profile"] else ""
    return (
        row["recipe"],
        str(row["seed"]),
        f"{row['pass_at_1']:.1%}",
        f"{row['pass_at_1_low']:.1%} to {row['pass_at_1_high']:.1%}",
        f"{row['greedy']:.1%}",
        f"{row['rollouts']:,.0f}",
        *(f"{row[f'flops_{account}']['total'] / size:.3g}{star}" for account in COMPARED),
        f"{row['seconds']['total']:,.0f}",
    )


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, raw: int = 0) -> str:
    """Return a table. The first `raw` columns hold HTML; everything else is escaped."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = ""
    for row in rows:
        cells = [cell if i < raw else escape(cell) for i, cell in enumerate(row)]
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def mark(evidence: Evidence, recipe: str, more: str = "") -> str:
    """Return a recipe's name with its colour in front."""
    hue = css(colours(evidence)[recipe])
    return f'<i class="mark" style="background:{hue}"></i>{escape(recipe + more)}'


def leaderboard_table(evidence: Evidence, rows: Sequence[Row]) -> str:
    """Return the leaderboard with the initial policy as its last row."""
    most = sorted(rows[0]["pass_at"], key=int)[-1]
    size, unit_name = flops_unit(rows)
    body = []
    for row in rows:
        _, seed, *cells = leader_cells(row, size)
        name = mark(evidence, row["recipe"], f"/{seed}")
        body.append(
            [name, *cells[:3], share(row["pass_at"][most]), f"{row['validation']:.1%}", *cells[3:]]
        )
    base = evidence.baseline
    spread = f"{base['pass_at_1_low']:.1%} to {base['pass_at_1_high']:.1%}"
    first = [
        f"{base['pass_at_1']:.1%}",
        spread,
        f"{base['greedy']:.1%}",
        share(base["pass_at"][most]),
    ]
    validation = f"{evidence.trained[0].curve['accuracy'][0]:.1%}"
    nothing = ["0"] * len(HEADERS[5:])
    body.append(['<i class="mark initial"></i>initial', *first, validation, *nothing])
    headers = ["recipe/seed", *HEADERS[2:5], f"pass@{most}", "validation", *HEADERS[5:]]
    return f'<p class="note">{unit_words(unit_name)}.</p>' + html_table(headers, body, raw=1)


def differences_table(evidence: Evidence, summary: Mapping[str, Any]) -> str:
    """Return the paired differences of every recipe."""
    headers, *body = difference_cells(summary)
    marked = [[mark(evidence, recipe), *cells] for recipe, *cells in body]
    words = escape(DIFFERENCES.format(resampled=resampled(summary)))
    return f"<h3>Differences</h3><p>{words}</p>" + html_table(headers, marked, raw=1)


def reach_table(evidence: Evidence, summary: Mapping[str, Any]) -> str:
    """Return the compute that each recipe's fitted curve takes to the accuracy that the reference
    ends with, in each account."""
    body = [
        [
            mark(evidence, recipe),
            *(reach_words(found["compute_to_reference"][account]) for account in COMPARED),
        ]
        for recipe, found in summary["recipes"].items()
    ]
    words = (
        f"Compute to a validation accuracy of {summary['target']:.1%}, which "
        f"{summary['reference']} ends with, by the fitted curves."
    )
    return f"<p>{escape(words)}</p>" + html_table(["recipe", *COMPARED], body, raw=1)


def advice_table(evidence: Evidence, advices: Mapping[str, Sequence[Advice]]) -> str:
    """Return the recipe to take at some budgets on every axis."""
    body = []
    for axis, rows in advices.items():
        for row in [rows[place - 1] for place in LADDER]:
            take = row["take"]
            if take is None:
                cells = ["initial policy", axis, amount(axis, row["budget"]), *"––––"]
            else:
                mine = row["recipes"][take]
                accuracy = f"{mine['accuracy']:.1%} ({mine['low']:.1%} to {mine['high']:.1%})"
                level = ", ".join(row["level_with"]) or "–"
                best = f"{mine['best']:.0%}"
                name = mark(evidence, take)
                began = share(mine["began"])
                cells = [name, axis, amount(axis, row["budget"]), began, accuracy, best, level]
            body.append(cells)
    headers = ["take", "axis", "budget", "began with", "validation", "best in draws"]
    return html_table([*headers, "not told apart from it"], body, raw=1)


def reach_words(needed: Mapping[str, float | None]) -> str:
    """Return the compute that an accuracy takes, with its interval; a dash where it was not
    reached."""
    words = {name: "–" if flops is None else flops_words(flops) for name, flops in needed.items()}
    return f"{words['flops']} ({words['low']} to {words['high']})"


def seeds_table(evidence: Evidence, recipes: dict[str, Row]) -> str:
    """Return mean and range over the seeds; nothing if there is one seed."""
    if all(summary["num_seeds"] == 1 for summary in recipes.values()):
        return ""
    body = [
        [
            mark(evidence, recipe),
            str(summary["num_seeds"]),
            share_range(summary["pass_at_1"]),
            share_range(summary["greedy"]),
            share_range(summary["validation"]),
            *(flops_words(summary[f"flops_{account}"]["mean"]) for account in COMPARED),
        ]
        for recipe, summary in recipes.items()
    ]
    headers = [
        "recipe",
        "seeds",
        "pass@1",
        "greedy",
        "validation",
        *COMPARED,
    ]
    caption = "<h3>Over the seeds</h3><p>Mean, and in brackets the lowest and the highest seed.</p>"
    return caption + html_table(headers, body, raw=1)


def share(value: float | None) -> str:
    """Return a share in per cent; a dash if there is none, as for pass@k with fewer than k
    samples."""
    return "–" if value is None else f"{value:.1%}"


def share_range(value: dict[str, float]) -> str:
    """Return the mean of a share with its range."""
    return f"{value['mean']:.1%} ({100 * value['min']:.1f} to {100 * value['max']:.1f})"


def bills_table(evidence: Evidence, rows: Sequence[Row]) -> str:
    """Return FLOPs by part in every account, with validation beside them."""
    body = []
    for row in rows:
        for account in (*COMPARED, *(name for name in ACCOUNTS if name not in COMPARED)):
            parts = row[f"flops_{account}"]
            cells = [
                flops_words(parts[part]) if parts.get(part) else "0"
                for part in (*PART_WORDS, "total")
            ]
            beside = flops_words(row["flops_validation"]) if account == "executed" else ""
            name = mark(evidence, row["recipe"], f"/{row['seed']}")
            body.append([name, account, *cells, beside])
    return html_table(
        ["recipe/seed", "account", *PART_WORDS.values(), "total", "validation, outside"],
        body,
        raw=1,
    )


def decisions_table(evidence: Evidence) -> str:
    """Return each recipe's decisions about the prompts, how often, and why (the reason without what
    was observed)."""
    body = []
    for plan in evidence.first_plans:
        why = plan.decisions.with_columns(pl.col("reason").str.replace(r"^solved \d+ of \d+; ", ""))
        counts = (
            why.group_by("decision", "group_size", "reason")
            .len()
            .sort("len", "reason", descending=[True, False])
        )
        for decision, size, reason, count in counts.iter_rows():
            number = f"{count:,} ({count / len(plan.decisions):.0%})"
            body.append([mark(evidence, plan.recipe), decision, str(size), number, reason])
    return html_table(["recipe", "decision", "group size", "prompts", "reason"], body, raw=1)


def plans_table(evidence: Evidence) -> str:
    """Return each plan in numbers."""
    body = []
    for plan in evidence.first_plans:
        visits = plan.visits
        sizes = ", ".join(f"{size}: {count:,}" for size, count in group_sizes(plan))
        prompts = f"{visits['prompt_id'].n_unique():,} of {len(plan.decisions):,}"
        phases = f"{visits['phase'].n_unique()} / {visits['pass'].n_unique()}"
        numbers = [
            prompts,
            f"{len(visits):,}",
            phases,
            f"{visits['group_size'].sum() / len(visits):.2f}",
            sizes,
        ]
        body.append([mark(evidence, plan.recipe), str(plan.forecast["strategy"]), *numbers])
    headers = [
        "recipe",
        "strategy",
        "prompts",
        "visits",
        "phases / passes",
        "mean group size",
        "visits by group size",
    ]
    return html_table(headers, body, raw=1)


def group_sizes(plan: RecipePlan) -> list[tuple[int, int]]:
    """Return the number of visits of each group size."""
    return list(plan.visits.group_by("group_size").len().sort("group_size").iter_rows())


def forecast_table(evidence: Evidence, rows: Sequence[Row]) -> str:
    """Return what each plan was expected to yield and cost, and what the training of each seed
    yielded and cost."""
    body = []
    for run in evidence.trained:
        row = next(row for row in rows if (row["recipe"], row["seed"]) == (run.recipe, run.seed))
        expected = evidence.plan(run.recipe, run.seed).forecast["plan"]
        happened: dict[str, Any] = {
            "rollouts": row["rollouts"],
            "mixed_groups": float(run.steps["num_mixed_groups"].sum()),
            "tokens": row["tokens"],
        }
        cells = [
            f"{expected[name]:,.0f} → {value:,.0f}{off(value, expected[name])}"
            for name, value in happened.items()
        ]
        charged = row["flops_charged"]["total"]
        cells.append(
            f"{flops_words(expected['flops_charged'])} → {flops_words(charged)}"
            f"{off(charged, expected['flops_charged'])}"
        )
        body.append([mark(evidence, run.recipe, f"/{run.seed}"), *cells])
    return html_table(
        ["recipe/seed", "rollouts", "mixed groups", "tokens", "charged compute"], body, raw=1
    )


def off(value: float, expected: float) -> str:
    """Return by how much the forecast was off."""
    return f" ({value / expected - 1:+.0%})" if expected else ""


def drift_table(evidence: Evidence, drifts: Mapping[str, Drift]) -> str:
    """Return how far each pass was from the profile, and its mixed groups against the forecast."""
    body = []
    for run in evidence.trained:
        for one in drifts[run.name]["passes"]:
            mixed = f"{one['mixed_rate_forecast']:.1%} → {one['mixed_rate']:.1%}"
            size = f"{one['group_size_mean']:.2f}"
            number = f"{one['num_groups']:,}"
            moved = [points(one["drift"], "+"), points(one["gap"]), points(one["chance"])]
            solved = [f"{one['expected']:.1%}", f"{one['success']:.1%}"]
            name = mark(evidence, run.recipe, f"/{run.seed}")
            body.append([name, str(one["pass"]), number, size, *solved, *moved, mixed])
    headers = [
        "recipe/seed",
        "pass",
        "groups",
        "mean size",
        "expected",
        "solved",
        "drift",
        "gap",
        "gap by chance",
    ]
    return html_table([*headers, "mixed: forecast → found"], body, raw=1)


def points(value: float, sign: str = "") -> str:
    """Return a difference of two shares in percentage points; `+` adds the sign."""
    return f"{100 * value:{sign}.1f}"


def seconds_table(evidence: Evidence, rows: Sequence[Row]) -> str:
    """Return measured seconds, and what training spent them on."""
    body = []
    for row in rows:
        run = next(run for run in evidence.seeds(row["recipe"]) if run.seed == row["seed"])
        inside = {name: value for name, value in run.cost["seconds"].items() if name != "train"}
        cells = [f"{row['seconds'][part]:,.1f}" for part in ("profile", "train", "lost", "total")]
        parts = ", ".join(f"{name} {value:,.1f}" for name, value in inside.items())
        body.append([mark(evidence, row["recipe"], f"/{row['seed']}"), *cells, parts])
    return html_table(
        ["recipe/seed", "profiling", "training", "lost to kills", "total", "inside training"],
        body,
        raw=1,
    )


def why_table(ran: Sequence[tuple[str, ...]], sampled: Sequence[tuple[str, ...]]) -> str:
    """Return when and why the flow last ran each stage, and what those that sample did."""
    tables = []
    if ran:
        tables.append(html_table(["stage", "when", "what it did", "why"], ran))
    if sampled:
        tables.append(html_table(["stage", "samples", "what it reused and sampled"], sampled))
    return "".join(tables) or "<p>No stage left a note.</p>"
