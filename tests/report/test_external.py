"""The page's tables of what other trainers did."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.reading.external import show
from tasks.common.artifacts import IMPORTED, Layout
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError
from tasks.report.external import write_external

OUTCOMES = {"p0": "cw", "p1": "cc", "p2": "cwww", "p3": "e"}
WORDS = {"c": "correct", "w": "wrong", "e": "error"}


def write_import(layout: Layout, name: str, outcomes: dict[str, str]) -> None:
    """Write rollouts of a trainer, nine tokens of prompt and two of completion each."""
    rows = [
        {**IMPORTED.example, "prompt_id": prompt, "sample_index": index, "outcome": WORDS[letter]}
        for prompt, letters in outcomes.items()
        for index, letter in enumerate(letters)
    ]
    folder = layout.external(name)
    IMPORTED.write(folder / "rollouts.parquet", IMPORTED.frame(rows))
    counts = {"num_rollouts": len(rows), "num_prompts": len(outcomes), "num_steps": 2}
    scored = {"from": "verl", "num_scored": len(rows) - 1, "num_differing": 1}
    write_checked(folder / "summary.json", counts | scored)


def tables(layout: Layout) -> list[list[list[str]]]:
    """Return the cells of the tables in `external.js`."""
    text = (layout.report / "external.js").read_text()
    found: list[dict[str, Any]] = json.loads(
        text.removeprefix("var imported = ").removesuffix(";\n")
    )
    return [table["cells"] for table in found]


def test_imports_are_rows_with_the_accuracy_here(tmp_path: Path) -> None:
    """Prompts are solved 1/2, 1 and 1/4 of the times; one could not be graded. The interval of
    equal values is not empty."""
    layout = Layout(tmp_path)
    write_external(layout, 50)
    assert tables(layout) == []
    write_import(layout, "first", OUTCOMES)
    write_import(layout, "none", {"p3": "ee"})
    write_external(layout, 50)
    [[_, first, none]] = tables(layout)
    assert first[:6] == ["external/first", "verl", "9", "4", "2", "58.3%"]
    assert first[7:] == ["1 of 8", "99"]
    low, high = (float(end.rstrip("%")) for end in first[6].split(" to "))
    assert 25 <= low < 58.3 < high <= 100
    assert none[5:7] == ["–", "–"]
    (layout.external("none") / "rollouts.parquet").write_bytes(b"PAR1")
    with pytest.raises(ArtifactError, match=r"none/rollouts.parquet is damaged"):
        write_external(layout, 50)


def test_an_import_after_the_report_is_shown(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    write_import(layout, "first", OUTCOMES)
    values = {"report": {"num_bootstrap": 50}}
    assert show(layout, values) == "the report of the next `winnow run` shows it"
    assert not layout.report.exists()
    layout.report.mkdir()
    (layout.report / "index.html").touch()
    assert show(layout, values).endswith("report/index.html")
    assert [row[0] for row in tables(layout)[0]] == ["name", "external/first"]
