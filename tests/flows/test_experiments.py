"""The table of experiments, from what `dvc exp show --json` says of them."""

from typing import Any

from flows.cli.experiments import rows


def state(rev: str, cells: dict[str, dict[str, Any]] | None, name: str | None = None) -> Any:
    """A revision as DVC describes it; without cells, one that waits in the queue."""
    metrics = {f"data/report/metrics/{cell}.json": {"data": v} for cell, v in (cells or {}).items()}
    data = {"metrics": {**metrics, "other.json": {"data": {"pass@1": 9.9}}}}
    return {"rev": rev, "name": name, "data": data if cells else None, "experiments": None}


def cell(recipe: str, seed: int, reached: float) -> dict[str, Any]:
    return {"recipe": recipe, "seed": seed, "pass@1": reached, "charged": 34.359}


def test_a_row_for_every_cell_and_a_dash_for_what_has_no_result() -> None:
    first = {"sgpo/0": cell("sgpo", 0, 0.5), "grpo/0": cell("grpo", 0, 0.4)}
    base = state("workspace", first)
    done = state("0123456789abcdef", {"grpo/0": cell("grpo", 0, 0.45)}, name="short")
    queued = state("fedcba9876543210", None)
    base["experiments"] = [{"revs": [done]}, {"revs": [queued]}]
    assert list(rows(base)) == [
        ["workspace", "grpo", "0", "0.4", "–", "34.359", "–", "–"],
        ["", "sgpo", "0", "0.5", "–", "34.359", "–", "–"],
        ["short", "grpo", "0", "0.45", "–", "34.359", "–", "–"],
        ["fedcba9", "–", "–", "–", "–", "–", "–", "–"],
    ]
