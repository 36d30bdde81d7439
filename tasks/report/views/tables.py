"""The tables of the report, as text for a terminal and as HTML. The numbers come from
`results`."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import polars as pl

from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.params import listed
from tasks.report.curves import COMPARED, flops_words, unit
from tasks.report.measured import key_of
from tasks.report.paired import Difference, points_words
from tasks.report.results import Results, Row, name_of
from tasks.report.views.charts import css
from tasks.report.views.figures import PART_WORDS

# columns of the leaderboard
HEADERS = (
    "recipe",
    "seed",
    "pass@1",
    "95 % interval",
    "greedy",
    "rollouts",
    *COMPARED,
)
UNKNOWN = "unknown"  # the executed FLOPs of another trainer
Captioned = tuple[str, list[tuple[str, ...]]]
"""A caption, and the rows of a table: the first contains headers, the first column recipes."""


def text_table(results: Results) -> str:
    """Return the leaderboard for a terminal, then notes on its columns, the paired differences, and
    the results at equal compute."""
    rows = results.rows
    size, unit_name = flops_unit(rows)
    below = (differences(results.summary), points_at_shares(results.summary))
    lines = [
        *aligned([HEADERS, *(leader_cells(row, size) for row in rows)]),
        "",
        unit_words(unit_name),
        f"initial policy: pass@1 {rows[0]['pass_at_1_initial']:.1%}, greedy "
        f"{rows[0]['greedy_initial']:.1%}",
        "* profiling included (charged to recipes that read the profile); validation and "
        "evaluation are not",
        *other_generation(rows),
        *(line for words, cells in below for line in ("", words, "", *aligned(cells))),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n\n"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal: headers, a rule, and rows. Names are
    left-aligned, numbers right-aligned."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def differences(summary: Mapping[str, Any]) -> Captioned:
    """Return a row per recipe, the best first: the percentage points by which its pass@1 exceeds
    that of the reference, the champion (if any) and the initial policy."""
    champion = summary["champion"]
    headers = {"reference": f"over {summary['reference']}"}
    if champion:
        headers["champion"] = f"over the champion {name_of(champion)}"
    headers["initial"] = "over the initial policy"
    recipes = summary["recipes"]
    ranked = sorted(recipes, key=lambda name: -recipes[name]["differences"]["initial"]["mean"])
    body = [
        (name, *(difference_words(recipes[name]["differences"][key]) for key in headers))
        for name in ranked
    ]
    over = recipes[ranked[0]]["differences"]["initial"]["over"]
    caption = (
        f"Differences of pass@1 in points, paired by test prompt (95 % intervals are over {over}):"
    )
    return caption, [("recipe", *headers.values()), *body]


def points_at_shares(summary: Mapping[str, Any]) -> Captioned:
    """Return a row for each recipe and share of the run (`report.points`)."""
    reference = summary["reference"]
    headers = ("recipe", "share", "validation", f"over {reference}", "compute ratio")
    rows = [
        (
            recipe,
            f"{point['share']:.0%}",
            share(point["accuracy"]),
            difference_words(point["over_reference"]),
            ratio_words(point["compute_ratio"]),
        )
        for recipe, points in summary["points"].items()
        for point in points
    ]
    caption = (
        f"Validation at shares of the run; compute of {reference} / of the recipe, to "
        f"{reference}'s accuracy there:"
    )
    return caption, [headers, *rows]


def ratio_words(times: Mapping[str, float | None] | None) -> str:
    """Return a factor with its interval; a dash if it is unknown."""
    if times is None or times["times"] is None:
        return "–"
    low, high = ("–" if times[end] is None else f"{times[end]:.1f}" for end in ("low", "high"))
    return f"{times['times']:.1f} ({low} to {high})"


def difference_words(over: Difference | None) -> str:
    """Return a difference in percentage points with its interval; a dash if there is none."""
    return "–" if over is None else f"{points(over['mean'], '+')} ({points_words(over)})"


def flops_unit(rows: Sequence[Row]) -> tuple[float, str]:
    """Return the size in FLOPs and the name of a common unit for the compute of all rows."""
    bills = (row[f"flops_{account}"] for row in rows for account in COMPARED)
    return unit(max(bill["total"] for bill in bills if bill))


def unit_words(name: str) -> str:
    return f"{', '.join(COMPARED)}: compute in {name}, by the rule of each account"


def other_generation(rows: Sequence[Row]) -> list[str]:
    """Return a note for each run that trained on rollouts of other runs, and one on the runs of
    another trainer."""
    foreign = [name_of(row) for row in rows if row["flops_executed"] is None]
    unknown = (
        f"{listed(foreign)}: another trainer, whose executed FLOPs are unknown; a run of it that "
        "was interrupted goes on from its checkpoint, but not bit for bit"
    )
    return [unknown] * bool(foreign) + [
        f"{name_of(row)}: it also trained on rollouts of {listed(row['not_charged'])}, whose "
        "generation is in the bill of that run alone"
        for row in rows
        if row["not_charged"]
    ]


def leader_cells(row: Row, size: float) -> tuple[str, ...]:
    """Return the cells of a leaderboard row, in the order of HEADERS; compute in units of `size`
    FLOPs."""
    star = "*" if row["reads_profile"] else ""
    return (
        row["recipe"],
        str(row["seed"]),
        f"{row['pass_at_1']:.1%}",
        f"{row['pass_at_1_low']:.1%} to {row['pass_at_1_high']:.1%}",
        f"{row['greedy']:.1%}",
        f"{row['rollouts']:,.0f}",
        *(
            f"{bill['total'] / size:.3g}{star}" if bill else UNKNOWN
            for bill in (row[f"flops_{account}"] for account in COMPARED)
        ),
    )


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table. The first column contains HTML; all other cells are escaped."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = ""
    for row in rows:
        cells = [row[0], *map(escape, row[1:])]
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def mark(results: Results, name: str) -> str:
    """Return the name of a recipe or run as HTML, preceded by a mark in the recipe's colour."""
    hue = css(results.colours[name.partition("/")[0]])
    return f'<i class="mark" style="background:{hue}"></i>{escape(name)}'


def leaderboard_table(results: Results) -> str:
    """Return the leaderboard as HTML, with the initial policy as its last row."""
    evidence, rows = results.evidence, results.rows
    most = sorted(rows[0]["pass_at"], key=int)[-1]
    size, unit_name = flops_unit(rows)
    initial = {
        **evidence.baseline,
        **{"recipe": "initial", "seed": 0, "reads_profile": False, "rollouts": 0},
        **{f"flops_{account}": {"total": 0.0} for account in COMPARED},
        "validation": evidence.trained[0].curve["accuracy"][0],
    }
    keys = {run.name: escape(key_of(run)) for run in evidence.trained}
    names = [
        f'<span data-measured="{keys[name_of(row)]}">{mark(results, name_of(row))}</span>'
        for row in rows
    ]
    names.append('<i class="mark initial"></i>initial')
    body = []
    for name, row in zip(names, [*rows, initial], strict=True):
        _, _, *cells = leader_cells(row, size)
        validation = f"{row['validation']:.1%}"
        cells[3:3] = [share(row["pass_at"][most]), validation]
        body.append([name, *cells, *"––"])  # the last two are filled in from measured.js
    headers = ["recipe/seed", *HEADERS[2:5], f"pass@{most}", "validation", *HEADERS[5:]]
    headers += ["seconds", "tokens/s"]
    notes = [unit_words(unit_name), *other_generation(rows)]
    paragraphs = "".join(f'<p class="note">{escape(note)}.</p>' for note in notes)
    return html_table(headers, body) + paragraphs


def captioned_table(results: Results, table: Captioned) -> str:
    words, (headers, *body) = table
    marked = [[mark(results, recipe), *rest] for recipe, *rest in body]
    return f"<p>{escape(words)}</p>" + html_table(headers, marked)


def seeds_table(results: Results) -> str:
    """Return a table of mean and range over the seeds; an empty string if there is one seed."""
    recipes = results.summary["recipes"]
    if all(summary["num_seeds"] == 1 for summary in recipes.values()):
        return ""
    body = [
        [
            mark(results, recipe),
            str(summary["num_seeds"]),
            share_range(summary["pass_at_1"]),
            share_range(summary["greedy"]),
            share_range(summary["validation"]),
            *(
                flops_words(bill["mean"]) if bill else UNKNOWN
                for bill in (summary.get(f"flops_{account}") for account in COMPARED)
            ),
        ]
        for recipe, summary in recipes.items()
    ]
    headers = ["recipe", "seeds", "pass@1", "greedy", "validation", *COMPARED]
    caption = "<h3>Over the seeds</h3><p>Mean, and in brackets the lowest and the highest seed.</p>"
    return caption + html_table(headers, body)


def share(value: float | None) -> str:
    """Return a share in per cent; a dash for None, as for pass@k with fewer than k samples."""
    return "–" if value is None else f"{value:.1%}"


def share_range(value: dict[str, float]) -> str:
    """Return the mean of a share over the seeds with its range, in per cent."""
    return f"{value['mean']:.1%} ({100 * value['min']:.1f} to {100 * value['max']:.1f})"


def bills_table(results: Results) -> str:
    """Return a table of each run's FLOPs by part and account; totals exclude validation."""
    body = []
    for row in results.rows:
        for account in (*COMPARED, *(name for name in ACCOUNTS if name not in COMPARED)):
            if (parts := row[f"flops_{account}"]) is None:
                continue
            cells = [
                flops_words(parts[part]) if parts.get(part) else "0"
                for part in (*PART_WORDS, "total")
            ]
            beside = flops_words(row["flops_validation"]) if account == "executed" else ""
            body.append([mark(results, name_of(row)), account, *cells, beside])
    return html_table(
        ["recipe/seed", "account", *PART_WORDS.values(), "total", "validation, outside"],
        body,
    )


def profiled_table(results: Results) -> str:
    """Return a row for each source of training prompts, with what the profile found there."""
    headers = ["source", "prompts", "pass rate", "never", "always"]
    headers += ["by successes", "best constant", "truncated", "repeated"]
    body = [
        (
            escape(source),
            f"{values['num_prompts']:,}",
            share(values["pass_rate_mean"]),
            share(values["never_solved_rate"]),
            share(values["always_solved_rate"]),
            " ".join(map(str, values["successes"])),
            f"{values['constant_answer'][:40]}: {share(values['constant_rate'])}",
            share(values["truncated_rate"]),
            share(values["repeated_rate"]),
        )
        for source, values in results.evidence.profiled.items()
    ]
    return html_table(headers, body)


def decisions_table(results: Results) -> str:
    """Return a table of the number of prompts by recipe, decision, group size and reason."""
    body = []
    for run in results.evidence.first_runs:
        why = run.decisions.with_columns(pl.col("reason").str.replace(r"^solved \d+ of \d+; ", ""))
        counts = (
            why.group_by("decision", "group_size", "reason")
            .len()
            .sort("len", "reason", descending=[True, False])
        )
        for decision, size, reason, count in counts.iter_rows():
            number = f"{count:,} ({count / len(run.decisions):.0%})"
            body.append([mark(results, run.recipe), decision, str(size), number, reason])
    return html_table(["recipe", "decision", "group size", "prompts", "reason"], body)


def plans_table(results: Results) -> str:
    """Return a table of each plan's size: prompts, visits, phases, passes and group sizes."""
    body = []
    for run in results.evidence.first_runs:
        visits = run.visits
        counts = visits.group_by("group_size").len().sort("group_size")
        sizes = ", ".join(f"{size}: {count:,}" for size, count in counts.iter_rows())
        prompts = f"{visits['prompt_id'].n_unique():,} of {len(run.decisions):,}"
        phases = f"{visits['phase'].n_unique()} / {visits['pass'].n_unique()}"
        numbers = [
            prompts,
            f"{len(visits):,}",
            phases,
            f"{visits['group_size'].sum() / len(visits):.2f}",
            sizes,
        ]
        body.append([mark(results, run.recipe), str(run.forecast["strategy"]), *numbers])
    headers = [
        "recipe",
        "strategy",
        "prompts",
        "visits",
        "phases / passes",
        "mean group size",
        "visits by group size",
    ]
    return html_table(headers, body)


def forecast_table(results: Results) -> str:
    """Return a table of the expected rates of each plan and the actual rates of each run. Totals
    are left out because they depend on the budget, which repeats a plan or cuts it short."""
    rows = {name_of(row): row for row in results.rows}
    body = []
    for run in results.evidence.trained:
        row, expected = rows[run.name], run.forecast["plan"]
        groups, mixed = run.steps.select("num_prompts", "num_mixed_groups").sum().row(0)
        length = expected["tokens"] / expected["rollouts"]
        cells = [
            f"{expected['mixed_rate']:.1%} → {mixed / max(groups, 1):.1%}",
            f"{length:.1f} → {row['tokens'] / max(row['rollouts'], 1):.1f}",
        ]
        body.append([mark(results, run.name), *cells])
    return html_table(["recipe/seed", "mixed groups", "tokens per rollout"], body)


def drift_table(results: Results) -> str:
    """Return a table of each pass's drift, and of its forecast and actual share of mixed groups."""
    body = []
    for run in results.evidence.trained:
        for one in results.summary["drift"][run.name]["passes"]:
            mixed = f"{one['mixed_rate_forecast']:.1%} → {one['mixed_rate']:.1%}"
            size = f"{one['group_size_mean']:.2f}"
            number = f"{one['num_groups']:,}"
            moved = [points(one["drift"], "+"), points(one["gap"]), points(one["chance"])]
            solved = [f"{one['expected']:.1%}", f"{one['success']:.1%}"]
            name = mark(results, run.name)
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
    return html_table([*headers, "mixed: forecast → found"], body)


def points(value: float, sign: str = "") -> str:
    """Return a difference of two shares in percentage points; `+` adds the sign."""
    return f"{100 * value:{sign}.1f}"
