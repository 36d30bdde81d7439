"""The harness's results, a file for each policy, task and set of settings:

    {"cell": "sgpo/0", "recipe": "sgpo", "seed": 0, "policy": "3f2a...", "task": "gsm8k",
     "task_version": 3.0, "settings": {"limit": null, ...}, "num_samples": 1319,
     "metrics": {"exact_match/strict-match": {"value": 0.61, "stderr": 0.013}}, "subtasks": {},
     "versions": {"lm_eval": "0.4.13", ...}, "seconds": 512.3, "is_told": true}

The files are in `harness/` under the data root, beside the outputs of the pipeline. The record of a
former policy of the cell is kept but not shown. `is_told`: whether the record is in MLflow."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tasks.common import params
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError, digest
from tasks.common.layout import Layout
from tasks.models.provenance import metrics_of

Record = dict[str, Any]
INITIAL = "initial"
HEADER = ("policy", "pass@1", "benchmark", "metric", "value", "stderr", "samples")
SIDES = ("left", "right", "left", "left", "right", "right", "right")


@dataclass(frozen=True)
class Subject:
    """A cell: a trained policy, or the initial policy if there is no recipe."""

    recipe: str | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        return INITIAL if self.recipe is None else f"{self.recipe}/{self.seed}"

    @property
    def trained(self) -> tuple[str, int] | None:
        """The recipe and the seed that trained the policy; None for the initial policy."""
        return None if self.recipe is None or self.seed is None else (self.recipe, self.seed)

    def card(self, layout: Layout) -> Path:
        """Return the path of the file with the policy's digest."""
        return layout.trained_card(*self.trained) if self.trained else layout.policy_card


def folder(layout: Layout, cell: Subject) -> Path:
    """Return the folder of a cell's records."""
    return layout.root / "harness" / cell.name


def path_of(layout: Layout, cell: Subject, task: str, key: Mapping[str, Any]) -> Path:
    """Return the file of one record; `key` contains everything that determines its numbers."""
    name = re.sub(r"[^\w.-]", "-", task)
    return folder(layout, cell) / f"{name}-{digest([task, key])}.json"


def records(layout: Layout, cell: Subject) -> Iterator[tuple[Path, Record]]:
    """Yield (path, record) of a cell's current policy, in the order of the file names."""
    files = sorted(folder(layout, cell).glob("*.json"))
    if not files or not cell.card(layout).exists():
        return
    policy = read_checked(cell.card(layout))["digest"]
    for path in files:
        record = read_checked(path)
        if record["policy"] == policy:
            yield path, record


def publish(
    values: Mapping[str, Any], layout: Layout, new: Sequence[tuple[Subject, Path, Record]]
) -> None:
    """Write records to MLflow: to a new run for each policy, and for a trained policy also to its
    cell's run. Then mark each record as written."""
    from tasks.common import tracking  # the table alone does not need it

    settings = params.section(values, "tracking", tracking.Tracking)
    for cell in dict.fromkeys(cell for cell, _, _ in new):
        with tracking.track(settings, layout, "eval", None, None) as tracker:
            tracker.tags({"benchmarked": cell.name})
            for _, path, record in (one for one in new if one[0] == cell):
                metrics = {
                    f"eval/{task}/{name}": metric["value"] for task, name, metric in shown(record)
                }
                tracker.benchmark(cell.recipe, cell.seed, cell.card(layout), metrics)
                write_checked(path, {**read_checked(path), "is_told": True})


def cells(layout: Layout) -> list[Subject]:
    """Return the initial policy's cell, then the cells of trained policies with records."""
    trained = (layout.root / "harness").glob("*/*/")
    named = {(path.parent.name, int(path.name)) for path in trained if path.name.isdecimal()}
    return [Subject(), *(Subject(recipe, seed) for recipe, seed in sorted(named))]


def shown(record: Record) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (task, name, metric) of a record; for a group without metrics, those of its tasks."""
    own = {record["task"]: record["metrics"]} if record["metrics"] else record["subtasks"]
    for task, metrics in own.items():
        for name, metric in metrics.items():
            yield task, name, metric


def table(layout: Layout) -> str:
    """Return a table of the current policies' benchmarks and pass@1, or an empty string if there
    are none."""
    rows = [
        (
            cell.name,
            pass_at_1(layout, cell),
            task,
            name,
            f"{metric['value']:.4f}",
            "" if metric["stderr"] is None else f"{metric['stderr']:.4f}",
            f"{record['num_samples']:,}",
        )
        for cell in cells(layout)
        for _, record in records(layout, cell)
        for task, name, metric in shown(record)
    ]
    if not rows:
        return ""
    return str(tabulate([HEADER, *rows], (), "plain", disable_numparse=True, colalign=SIDES))


def pass_at_1(layout: Layout, cell: Subject) -> str:
    """Return pass@1 of the pipeline's own evaluation, or an empty string if there is none of the
    present policy."""
    folder = layout.evaluation(*cell.trained) if cell.trained else layout.baseline
    with suppress(ArtifactError, KeyError):
        return f"{metrics_of(cell.card(layout), folder)['pass_at_1']:.1%}"
    return ""
