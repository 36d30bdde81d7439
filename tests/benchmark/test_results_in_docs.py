"""The page of the benchmark and the README's table are those of the results file that is kept."""

import shutil
from pathlib import Path

from tasks.benchmark.protocol import read_protocol
from tasks.benchmark.tables import write_readme, write_tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
COMMAND = "python -m flows.benchmark docs/results/protocol.yaml --tables --readme README.md"


def test_the_page_and_the_readme_are_those_of_the_results(tmp_path: Path) -> None:
    protocol, values = read_protocol(RESULTS / "protocol.yaml")
    for name in ("protocol.jsonl", "protocol.facts.json"):
        shutil.copy(RESULTS / name, tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    file = tmp_path / "protocol.jsonl"
    write_tables(protocol, values, file)
    write_readme(protocol, values, file, tmp_path / "README.md")
    for ours, kept in (
        (tmp_path / "protocol.md", RESULTS / "protocol.md"),
        (tmp_path / "README.md", ROOT / "README.md"),
    ):
        assert ours.read_text() == kept.read_text(), f"{kept} is not that of the results: {COMMAND}"
    figures = {path.name for path in RESULTS.glob("*.svg")}
    assert figures == {path.name for path in tmp_path.glob("*.svg")}
