"""What the harness measured, a file for each policy, task and way of measuring:

    {"cell": "sgpo/0", "recipe": "sgpo", "seed": 0, "policy": "3f2a...", "evidence": "91c0...",
     "task": "gsm8k", "task_version": 3.0, "settings": {"limit": null, ...}, "num_samples": 1319,
     "metrics": {"exact_match/strict-match": {"value": 0.61, "stderr": 0.013}}, "subtasks": {},
     "versions": {"lm_eval": "0.4.13", ...}, "seconds": 512.3, "is_told": true}

They stand beside the outputs of the pipeline, in `harness/` under the data root. `evidence` is the
digest of the file by which a policy is known without reading its weights: a record of a policy
that has been trained again since is kept and not shown. `is_told` says that MLflow has it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, digest, digest_file
from tasks.common.layout import Layout
from tasks.common.sealed import read_sealed, write_sealed

Record = dict[str, Any]
INITIAL = "initial"
HEADER = ("policy", "pass@1", "benchmark", "metric", "value", "stderr", "samples")


@dataclass(frozen=True)
class Subject:
    """A trained policy, or without a recipe the initial one."""

    recipe: str | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        return INITIAL if self.recipe is None else f"{self.recipe}/{self.seed}"

    def evidence(self, layout: Layout) -> Path:
        """The small file that is another whenever the policy is."""
        if self.recipe is None or self.seed is None:
            return layout.policy_card
        return layout.train(self.recipe, self.seed) / "curve.parquet"

    def metrics(self, layout: Layout) -> Path:
        """What the pipeline itself measured on the test prompts."""
        if self.recipe is None or self.seed is None:
            return layout.baseline / "metrics.json"
        return layout.evaluation(self.recipe, self.seed) / "metrics.json"


def folder(layout: Layout, cell: Subject) -> Path:
    """Where the records of a cell stand."""
    return layout.root / "harness" / cell.name


def path_of(layout: Layout, cell: Subject, task: str, key: Mapping[str, Any]) -> Path:
    """The file of one record; `key` is everything that its numbers depend on."""
    name = re.sub(r"[^\w.-]", "-", task)
    return folder(layout, cell) / f"{name}-{digest([task, key])}.json"


def records(layout: Layout, cell: Subject) -> Iterator[tuple[Path, Record]]:
    """The records of the policy that a cell has now, in the order of their files."""
    files = sorted(folder(layout, cell).glob("*.json"))
    if not files or not cell.evidence(layout).exists():
        return
    evidence = digest_file(cell.evidence(layout))
    for path in files:
        record = read_sealed(path)
        if record["evidence"] == evidence:
            yield path, record


def told(path: Path) -> None:
    """Note that MLflow has a record."""
    write_sealed(path, {**read_sealed(path), "is_told": True})


def cells(layout: Layout) -> list[Subject]:
    """The cells that have records, the initial policy first."""
    trained = (layout.root / "harness").glob("*/*/")
    named = {(path.parent.name, int(path.name)) for path in trained if path.name.isdecimal()}
    return [Subject(), *(Subject(recipe, seed) for recipe, seed in sorted(named))]


def shown(record: Record) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(task, name, metric) of a record; of a group that has no metrics itself, those of its
    tasks."""
    own = {record["task"]: record["metrics"]} if record["metrics"] else record["subtasks"]
    for task, metrics in own.items():
        for name, metric in metrics.items():
            yield task, name, metric


def table(layout: Layout) -> str:
    """Every benchmark of the policies that there are now, beside pass@1; no text where there is
    none."""
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
    return aligned([HEADER, *rows]) if rows else ""


def pass_at_1(layout: Layout, cell: Subject) -> str:
    """Of the pipeline's own evaluation; nothing where there is none."""
    with suppress(ArtifactError, KeyError):
        return f"{read_sealed(cell.metrics(layout))['pass_at_1']:.1%}"
    return ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: names to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADER))]
    is_name = [name in ("policy", "benchmark", "metric") for name in HEADER]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_name, strict=True)
        ).rstrip()
        for row in rows
    )
