"""Compare the savings that a first look predicts with those of finished runs.

    python -m tests.bench.first_look NAME=REFERENCE[:ROOT] ...

REFERENCE is a data root with a run of `grpo`, and ROOT one with a run of `sgpo` on the same prompts
with as many passes (default: the same root). Appends rows to docs/results/first_look.csv, and draws
first_look.svg from all of them. A row has the saving of the plan with its profile relative to
groups of 8 for every prompt: as measured, and as predicted from all profiled prompts and from 64
(mean and central 95 % of 200 random looks). The formula `first` computes a prompt with each of its
rollouts, `present` once a group; in `charged` they agree."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from tasks.allocate.budget import compared_plan
from tasks.allocate.first_look import Pass, pass_of
from tasks.code.effective import complete
from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.artifacts import PROFILE, TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked
from tasks.common.files import replace_file
from tasks.common.layout import Layout
from tasks.common.params import load
from tests.bench.block_lines import PARTS, ROOT, mixed_rollouts

RESULTS = ROOT / "docs/results/first_look.csv"
GROUP_SIZE = 8  # of `grpo`
NUM_LOOKS, LOOK = 200, 64
UNITS = ("pass", "mixed rollout")
FORMULAS = ("first", "present")
SERIES = {("charged", "present"): "o", ("executed", "present"): "s", ("executed", "first"): "x"}


def rows_of(name: str, reference: Layout, plan: Layout) -> Iterator[dict[str, Any]]:
    """Yield a row for each account, unit and formula."""
    values = complete(load(plan.root / "params.yaml"))
    seed, passes = values["experiment"]["seeds"][0], values["allocate"]["passes"]
    profile = PROFILE.read(plan.profile / "profile.parquet")
    costs = [costs_of(reference, "grpo", seed), costs_of(plan, "sgpo", seed)]
    if (num := passes * len(profile) * GROUP_SIZE) != costs[0]["rollouts"]:
        raise SystemExit(f"{reference.root}: grpo must have {num:,} rollouts, {passes} passes")
    rng = np.random.default_rng(0)
    rows = [rng.permutation(len(profile))[:LOOK] for _ in range(NUM_LOOKS)]
    looks = [savings(values, profile[each]) for each in rows]
    whole = savings(values, profile)
    for key, predicted in whole.items():
        account, unit, formula = key
        by_look = np.array([each[key] for each in looks])
        low, high = np.quantile(by_look, (0.025, 0.975))
        yield {
            "name": name,
            "dead": float((profile["pass_rate"].is_in([0.0, 1.0])).mean()),  # type: ignore[arg-type]
            "passes": passes,
            "account": account,
            "unit": unit,
            "formula": formula,
            "predicted": predicted,
            "look": float(by_look.mean()),
            "look_low": float(low),
            "look_high": float(high),
            "measured": measured(costs, account, unit),
        }


def costs_of(layout: Layout, recipe: str, seed: int) -> Mapping[str, float]:
    """Return a run's FLOPs by account, with the profile if it reads it, and its mixed rollouts."""
    out = layout.train(recipe, seed)
    flops, profile = read_checked(out / "flops.json"), {}
    if read_checked(layout.plan(recipe, seed) / "forecast.json")["reads_profile"]:
        profile = read_checked(layout.profile / "flops.json")
    spent = {
        name: sum(flops[name][part] for part in PARTS) + profile.get(name, {}).get("profile", 0.0)
        for name in ACCOUNTS
    }
    mixed = mixed_rollouts(TRAIN_ROLLOUTS.read(out / "rollouts.parquet"))
    spent["rollouts"] = flops["rollouts"]["generate"]
    return {**spent, UNITS[1]: float(mixed), UNITS[0]: 1.0}


def measured(costs: list[Mapping[str, float]], account: str, unit: str) -> float:
    reference, plan = (each[account] / each[unit] for each in costs)
    return 1.0 - plan / reference


def savings(values: Mapping[str, Any], profile: pl.DataFrame) -> dict[tuple[str, str, str], float]:
    """Return the predicted savings by account, unit and formula."""
    compared, one = compared_plan(values, profile, "sgpo"), np.ones((1, len(profile)))
    passes, found = compared.uniform.times, {}
    present = [
        pass_of(visits, compared, num).summed(one)
        for visits, num in (
            (compared.samples, 1),
            (compared.plan, passes),
            (compared.uniform, passes),
        )
    ]
    for formula, parts in zip(FORMULAS, (map(with_prompts, present), present), strict=True):
        profiled, plan, uniform = parts
        share = float(plan.mixed[0] / uniform.mixed[0])
        for account in ("charged", "executed"):
            mine, theirs = (float(each.cost(account, 1.0)[0]) * passes for each in (plan, uniform))
            cost = (float(profiled.sampling(account)[0]) + mine) / theirs
            for unit, rate in zip(UNITS, (1.0, share), strict=True):
                found[account, unit, formula] = 1.0 - cost / rate
    return found


def with_prompts(each: Pass) -> Pass:
    """Return a pass that computes a prompt with each of its rollouts."""
    return replace(each, computed=each.rollouts, computed_mixed=each.mixed)


def write_figure(rows: pl.DataFrame) -> None:
    """Draw measured against predicted savings, a panel for each unit."""
    with mpl.rc_context({"svg.hashsalt": "winnow", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        for axes, unit in zip(figure.subplots(1, 2), UNITS, strict=True):
            part = rows.filter(unit=unit)
            for (account, formula), marker in SERIES.items():
                of = part.filter(account=account, formula=formula)
                spread = [of["look"] - of["look_low"], of["look_high"] - of["look"]]
                label = account + (", formula before" if formula == FORMULAS[0] else "")
                style = {"fmt": marker, "label": label, "elinewidth": 0.7}
                axes.errorbar(of["look"], of["measured"], xerr=spread, **style)
            axes.axline((0, 0), slope=1, color="grey", linewidth=0.7)
            axes.set(title=f"saving per {unit}", xlabel="predicted from 64 prompts")
            axes.set(ylabel="measured")
            axes.legend()
        path, metadata = RESULTS.with_suffix(".svg"), {"Date": None}
        replace_file(path, lambda stream: figure.savefig(stream, format="svg", metadata=metadata))


def table(rows: pl.DataFrame) -> list[str]:
    """Return the table of the documentation: savings in percent."""
    header = ["problems", "dead prompts", "account"]
    header += [f"per {u}: {what}" for u in UNITS for what in ("predicted", "before", "measured")]
    lines = [header, ["---"] * len(header)]
    keys = ["name", "account"]
    for (name, account), part in rows.group_by(keys, maintain_order=True):
        cells = [str(name), f"{100 * part['dead'][0]:.0f} %", f"`{account}`"]
        for unit in UNITS:
            of = part.filter(unit=unit)
            now, before = (of.filter(formula=each).row(0, named=True) for each in FORMULAS[::-1])
            ends = (100 * now[each] for each in ("look", "look_low", "look_high"))
            cells.append("{:.0f} ({:.0f} to {:.0f})".format(*ends))
            cells += [f"{100 * before['look']:.0f}", f"{100 * now['measured']:.0f}"]
        lines.append(cells)
    return ["| " + " | ".join(line) + " |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("roots", nargs="*", help="NAME=REFERENCE[:ROOT]")
    args = parser.parse_args()
    found = [pl.read_csv(RESULTS)] if RESULTS.exists() else []
    for each in args.roots:
        name, _, roots = each.partition("=")
        reference, _, plan = roots.partition(":")
        if not reference or any(name in part["name"] for part in found):
            raise SystemExit(f"{each}: is not NAME=REFERENCE[:ROOT], or {RESULTS} has this name")
        pair = Layout(Path(reference)), Layout(Path(plan or reference))
        found.append(pl.DataFrame([*rows_of(name, *pair)]))
    rows = pl.concat(found).with_columns(pl.selectors.float().round(4))
    replace_file(RESULTS, lambda file: file.write(rows.write_csv().encode()))
    write_figure(rows)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
