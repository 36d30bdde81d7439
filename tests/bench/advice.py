"""Check whether the forecast at the end of `winnow plan` ranks recipes as finished runs do.

    python -m tests.bench.advice

The runs are the published lines of docs/results/protocol.yaml, for the families that the embedded
policy can profile, each recipe with the settings that its search chose. Prompts and profile of each
family are made by the protocol. Test accuracy is read at equal compute, the profile included: at
the compute of `grpo` at its middle budget in the account `executed`, interpolated between a
recipe's budgets over the logarithm of compute. Prints each recipe's forecast and accuracy, and
Spearman's rank correlation with its n, over all recipes and over the recipes without excluded slots
in the forecast. The lines are superseded: they are from earlier code."""

import argparse
import json
import logging
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from flows.benchmark import results
from flows.benchmark.cells import run_stage
from flows.benchmark.protocol import make_cell, read_protocol
from tasks.allocate.advice import Forecast, forecast_of
from tasks.allocate.budget import read_profile
from tasks.common.layout import Layout
from tests.bench.world import PROJECT, place_embedded

RESULTS = PROJECT / "docs" / "results"
Lines = list[dict[str, Any]]


def read_lines(family: str) -> dict[str, dict[float, Lines]]:
    """Return the test lines of a family by recipe and budget; of several settings, the settings
    with the best validation."""
    found: dict[str, dict[float, dict[str, Lines]]] = defaultdict(lambda: defaultdict(dict))
    for line in results.read_lines(RESULTS / "protocol.jsonl"):
        if line["family"] == family and line["measures"] == "test" and "failed" not in line:
            by_settings = found[line["recipe"]][line["budget"]]
            by_settings.setdefault(json.dumps(line["settings"], sort_keys=True), []).append(line)
    return {
        recipe: {budget: max(sets.values(), key=validation) for budget, sets in budgets.items()}
        for recipe, budgets in found.items()
    }


def validation(lines: Lines) -> float:
    return float(np.mean([line["validation"] for line in lines]))


def spent(lines: Lines) -> float:
    """Return the mean compute of runs, including their profile."""
    parts = ("flops", "flops_profile")
    return float(np.mean([sum(line[part]["executed"] for part in parts) for line in lines]))


def accuracy_at(amount: float, by_budget: Mapping[float, Lines]) -> float:
    """Return the test accuracy at this compute, NaN outside the range of compute spent."""
    points = [(spent(ran), np.mean([line["test"] for line in ran])) for ran in by_budget.values()]
    compute, accuracy = zip(*sorted(points), strict=True)
    found = np.interp(np.log(amount), np.log(compute), accuracy, left=np.nan, right=np.nan)
    return float(found)


def compared(family: str, num_prompts: int | None) -> Iterator[tuple[Forecast, float]]:
    """Yield the forecast and the test accuracy of every recipe of a family. The accuracy is NaN if
    the runs do not reach the compute of the comparison."""
    protocol, values = read_protocol(RESULTS / "protocol.yaml")
    found = read_lines(family)
    reference = found["grpo"]
    amount = spent(reference[sorted(reference)[len(reference) // 2]])
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder) / "data")
        place_embedded(layout)
        for recipe, by_budget in found.items():
            nearest = min(by_budget, key=lambda b: abs(np.log(spent(by_budget[b]) / amount)))
            settings = by_budget[nearest][0]["settings"]
            owner = (family, protocol.families[family])
            cell = make_cell(values, owner, recipe, int(nearest), 0, "test", settings)
            ours = {**cell.params, "engine": {**cell.params["engine"], "device": "cpu"}}
            ours["experiment"] |= {"budget": {"account": "executed", "amount": amount}}
            if num_prompts is not None:
                ours["ingest"]["splits"]["train"] = num_prompts
            if not layout.profile.exists():
                run_stage("ingest", ours, layout)
                run_stage("profile", ours, layout)
            forecast = forecast_of(ours, layout, read_profile(layout), recipe)
            yield forecast, accuracy_at(amount, by_budget)


def correlation(pairs: list[tuple[Forecast, float]]) -> str:
    if len(pairs) < 3:
        return f"too few recipes for a rank correlation, n = {len(pairs)}"
    information, accuracy = zip(
        *((row.information, reached) for row, reached in pairs), strict=True
    )
    rho = stats.spearmanr(information, accuracy)
    return f"Spearman {rho.statistic:+.2f} (p = {rho.pvalue:.2f}), n = {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", default=["embedded", "hard"])
    parser.add_argument("--prompts", type=int, help="profile so many; by default as published")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for family in options.families:
        pairs = list(compared(family, options.prompts))
        pairs = [pair for pair in pairs if np.isfinite(pair[1])]
        for row, reached in sorted(pairs, key=lambda pair: -pair[1]):
            slots = f"  leaves out {', '.join(row.left_out)}" if row.left_out else ""
            print(f"{family:10} {row.recipe:16} {row.information:.4g} {reached:.1%}{slots}")
        print(f"{family}: {correlation(pairs)}")
        whole = [pair for pair in pairs if not pair[0].left_out]
        print(f"{family}, no slot left out: {correlation(whole)}")


if __name__ == "__main__":
    main()
