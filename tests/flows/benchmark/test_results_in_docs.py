"""The pages of the benchmarks and the guide agree with the results files."""

import shutil
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from flows.benchmark.headline import all_runs, ratios, runs_of, spread_of
from flows.benchmark.protocol import read_protocol
from flows.benchmark.results import read_facts, read_lines
from flows.benchmark.runner import due
from flows.benchmark.tables import ratio_words, write_tables
from tests.docs.pages import PAGES

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
COMMAND = "winnow bench docs/results/{}.yaml --tables"
ACCOUNTS = ("executed", "charged_mixed")


@cache
def shown(name: str) -> list[dict[str, Any]]:
    """Return the lines that the page of a results file shows."""
    protocol, values = read_protocol(RESULTS / f"{name}.yaml")
    return due(protocol, values, read_lines(RESULTS / f"{name}.jsonl"))


@pytest.mark.parametrize(
    ("name", "page", "start", "end"),
    [
        ("protocol", "docs/guide/winnow.md", "## Results", "\n## "),
        ("all", "docs/guide/results.md", "## 31 methods, tuned alike", "\n## "),
        ("paper-passes", "docs/guide/results.md", "## sGPO in its own regime", "\n## "),
        ("ahead", "docs/guide/training.md", "(../results/ahead.md)", "\n\n"),
        ("provision", "docs/guide/training.md", "(../results/provision.md)", "\n\n"),
    ],
)
def test_superseded_results_are_marked_in_the_guide(
    name: str, page: str, start: str, end: str
) -> None:
    _, found, rest = (ROOT / page).read_text().partition(start)
    assert found
    is_superseded = any("superseded" in line for line in shown(name))
    assert ("superseded" in rest.partition(end)[0]) == is_superseded


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.yaml")))
def test_the_pages_agree_with_the_results(tmp_path: Path, name: str) -> None:
    protocol, values = read_protocol(RESULTS / f"{name}.yaml")
    for file in (*RESULTS.glob(f"{name}.jsonl*"), RESULTS / f"{name}.facts.json"):
        shutil.copy(file, tmp_path)
    file = tmp_path / f"{name}.jsonl"
    write_tables(protocol, values, file)
    ours, there = file.with_suffix(".md"), RESULTS / f"{name}.md"
    assert ours.read_text() == there.read_text(), f"{there}: {COMMAND.format(name)}"
    figures = {path.name for path in RESULTS.glob(f"{name}-*.svg")}
    assert figures == {path.name for path in tmp_path.glob("*.svg")}


@cache
def ratios_on(family: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Return a family's column in the tables of the second protocol: the accuracy of the reference,
    and the cells by account and row."""
    protocol, lines = read_protocol(RESULTS / "protocol2.yaml")[0], shown("protocol2")
    runs = all_runs(protocol, family, lines)
    reference = runs_of(protocol, family, protocol.reference, lines)
    assert reference is not None
    spread = spread_of(list(runs.values()))
    oracle = read_facts(RESULTS / "protocol2.jsonl")[family]["oracle"]
    cells = {name: {"oracle, modelled": f"{oracle.get(name, 0.0):.1f}"} for name in ACCOUNTS}
    for recipe in runs.keys() - set(protocol.reference):
        for uses in (1, 4) if runs[recipe].reads_profile() else (1,):
            row = f"`{recipe}`" + ", profile shared by 4 runs" * (uses > 1)
            for name, found in ratios(runs[recipe], reference, ACCOUNTS, spread, uses).items():
                cells[name][row] = ratio_words(found[8192])
    target = mean(reference.points[reference.best[8192]].tests)
    return f"{100 * target:.1f} %", cells


@pytest.mark.xdist_group("protocol2")  # one process reads the lines, once
@pytest.mark.parametrize(
    ("page", "start", "account", "num_rows"),
    [
        ("docs/guide/benchmark.md", "## The answer", "executed", 8),
        ("docs/guide/benchmark.md", "The same in `charged_mixed`", "charged_mixed", 5),
    ],
)
def test_tables_of_ratios_agree_with_the_results(
    page: str, start: str, account: str, num_rows: int
) -> None:
    section = (ROOT / page).read_text().partition(start)[2]
    table = section[section.index("| recipe |") :].partition("\n\n")[0].splitlines()
    head, _, target, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table]
    families = ["brief", "worked", "embedded", "hard", "deep"]
    assert head[1:] == [f"`{family}`" for family in families]
    assert target[1:] == [ratios_on(family)[0] for family in families]
    assert len({name for name, *_ in rows}) == num_rows
    for name, *cells in rows:
        assert cells == [ratios_on(family)[1][account].get(name, "") for family in families]
        assert any(cells), name
    is_superseded = any("superseded" in line for line in shown("protocol2"))
    assert ("superseded" in section.partition("\n## ")[0]) == is_superseded


def test_index_and_readme_give_the_same_pitch() -> None:
    pages = [(ROOT / name).read_text().split("\n\n") for name in ("README.md", "docs/index.md")]
    pitches = [[text for text in page if text.startswith(("**With", "Reinf"))] for page in pages]
    assert pitches[0] == pitches[1]
    assert len(pitches[0]) == 2


def test_no_page_has_a_ratio_as_times_less() -> None:
    pages = {*PAGES, *RESULTS.glob("*.md")} - {ROOT / "CHANGELOG.md"}
    assert [page.name for page in pages if "times less" in page.read_text()] == []


def finished_runs(name: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the test runs of a results file by family and recipe."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in shown(name):
        if row["measures"] == "test":
            found.setdefault((row["family"], row["recipe"]), []).append(row)
    return found


def test_the_guide_has_the_results_of_over_provisioning() -> None:
    guide = " ".join((ROOT / "docs/guide/training.md").read_text().split())
    before = guide.partition("([the results](../results/provision.md))")[0]
    section = before.rpartition("The cost in accuracy")[2]
    runs = finished_runs("provision")
    assert {recipe for _, recipe in runs} == {"grpo", "winnow"}
    for cell, rows in runs.items():
        assert len(rows) == 3
        assert f"{mean(row['test'] for row in rows):.1%}".rstrip("%") in section, cell


def test_the_guide_has_the_results_of_sgpos_regime() -> None:
    """They are the saving at equal passes, and its factors."""
    rows = [row for row in shown("paper-passes") if row["measures"] == "test"]

    def of(recipe: str, budget: int) -> dict[str, Any]:
        found = [row for row in rows if (row["recipe"], row["budget"]) == (recipe, budget)]
        assert len(found) == 5
        flops = mean(row["flops"]["charged_paper"] for row in found)
        profile = mean(row["flops_profile"]["charged_paper"] for row in found)
        return {"train": flops, "all": flops + profile, "test": mean(r["test"] for r in found)}

    guide = (ROOT / "docs/guide/results.md").read_text().partition("## sGPO in its own regime")[2]
    for recipe, budget in (("grpo", 8192), ("sgpo", 2088), ("grpo", 2600), ("grpo", 2088)):
        cell = of(recipe, budget)
        assert f"| {cell['all'] / 1e12:.3f} T | {cell['test']:.1%} |".replace("%", " %") in guide
    whole, short = of("grpo", 8192), of("sgpo", 2088)
    rollouts = 8192 / 2088
    factors = {
        "fewer rollouts a pass": rollouts,
        "fewer tokens a rollout": whole["train"] / short["train"] / rollouts,
        "share of the training in the sum with the profile": short["train"] / short["all"],
        "in all": whole["all"] / short["all"],
    }
    for words, factor in factors.items():
        assert f"| {words} | {factor:.2f} |" in guide


def test_the_guide_has_the_results_of_every_method() -> None:
    guide = (ROOT / "docs/guide/results.md").read_text()
    section = guide.partition("## 31 methods, tuned alike")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(lines) == 8
    runs = finished_runs("all")
    for line in lines:
        found = runs["embedded", line.split("`")[1]]
        tests = [row["test"] for row in found]
        flops = [
            mean(row["flops"][name] + row["flops_profile"][name] for row in found) / 1e12
            for name in ("charged", "charged_mixed", "executed")
        ]
        accuracy = f"{mean(tests):.1%} ({100 * min(tests):.1f} to {100 * max(tests):.1f})"
        numbers = [accuracy.replace("%", " %"), *(f"{number:.3f} T" for number in flops)]
        assert f" | {' | '.join(numbers)} | " in line


def test_the_guide_has_the_results_of_sampling_ahead() -> None:
    guide = " ".join((ROOT / "docs/guide/training.md").read_text().split())
    runs = finished_runs("ahead")
    reached = {
        recipe: [
            f"{100 * mean(row['test'] for row in runs[f'staleness_{limit}', recipe]):.1f}"
            for limit in (0, 1, 3)
        ]
        for recipe in ("grpo", "winnow")
    }
    assert "`grpo` reached {}, {} and {} % at 0, 1 and 3".format(*reached["grpo"]) in guide
    assert "and `winnow` {}, {} and {} %.".format(*reached["winnow"]) in guide
