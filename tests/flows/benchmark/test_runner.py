"""The next cell follows from the results file: halving, the choice on validation, resuming."""

import logging
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from flows.__main__ import parser_of
from flows.benchmark import cells, runner
from flows.benchmark.cells import prepare_family, run_cell, thinned
from flows.benchmark.protocol import BenchmarkCell, Protocol, make_cell, read_protocol, trials
from flows.benchmark.results import append_result, digits, facts_file, read_lines, read_results
from flows.benchmark.runner import due, expected_hours, run_in_worker, runnable, supersede_others
from flows.benchmark.tables import page, write_tables
from flows.cli import bench
from tasks.common.artifacts import PLAN
from tasks.common.files import ArtifactError, WriteError, write_json
from tasks.common.params import ParamsError
from tasks.policy.source import EMBEDDED
from tests.flows.benchmark.test_headline import line as line_of
from tests.parameters import every_value
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
CONTESTANT = {"trials": 4, "budgets": [100, 200], "knob": "allocate.group_size", "values": [4, 8]}
PROTOCOL: dict[str, Any] = {
    "parameters": str(ROOT / "params.yaml"),
    "reference": ["grpo"],
    "seeds": [0, 1],
    "title": "Small",
    "search": {
        "axes": {"learning_rate": [1.0e-4, 3.0e-4, 9.0e-4], "batch.size": [8, 16]},
        "keep_share": 0.5,
        "seeds": [99],
    },
    "contestants": [{"recipe": name, **CONTESTANT} for name in ("grpo", "one_sided")],
    "families": {"small": {"budgets": [100, 200], "changes": {}}},
}


def protocol_of(folder: Path, **changes: Any) -> tuple[Protocol, dict[str, Any]]:
    path = folder / "protocol.yaml"
    path.write_text(yaml.safe_dump({**PROTOCOL, **changes}))
    return read_protocol(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [([".", "--tables"], r"\. is not a file"), ([__file__, "--supersede", " "], "needs a reason")],
)
def test_a_wrong_call_runs_nothing(words: list[str], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        bench.run(parser_of("bench").parse_args(["bench", *words]))


def test_a_part_of_the_protocol_has_the_named_families_and_recipes(tmp_path: Path) -> None:
    small = {"budgets": [100], "changes": {"profile": {"num_samples": 4}}}
    families = {"small": PROTOCOL["families"]["small"], "other": small}
    protocol, values = protocol_of(tmp_path, families=families)
    only = protocol.only(["other"])
    assert {cell.family for cell in runnable(only, values, {})} == {"other"}
    assert expected_hours(only, {}, 1) < expected_hours(protocol, {}, 1)
    one = protocol.only(None, ["grpo"])
    line = {"family": "small", "recipe": "of another call", "budget": 10**6, "seconds": 1.0}
    assert expected_hours(one, {"key": line}, 1) > 0.0
    found = {(cell.family, cell.recipe) for cell in runnable(one, values, {})}
    assert found == {("small", "grpo"), ("other", "grpo")}
    with pytest.raises(ParamsError, match="has no family tiny; use: other, small"):
        protocol.only(["tiny"])
    with pytest.raises(ParamsError, match="has no recipe tiny; use: "):
        protocol.only(None, ["tiny"])


def test_all_recipes_try_the_same_points_and_their_own_settings_first(tmp_path: Path) -> None:
    protocol, _ = protocol_of(tmp_path)
    tried = [trials(protocol.search, contestant, 99) for contestant in protocol.contestants]
    assert tried[0] == tried[1]
    assert len(tried[0]) == 4
    another = trials(protocol.search, protocol.contestants[0], 98)
    assert another[0] == tried[0][0]
    assert another[1:] != tried[0][1:]
    assert tried[0][0] == {}
    assert {"train.learning_rate", "train.batch.size", "allocate.group_size"} == set(tried[0][1])


def test_a_protocol_can_add_recipes(tmp_path: Path) -> None:
    added = {"large": {"from": "grpo", "allocate": {"group_size": 32}}}
    contestants = [{"recipe": name, **CONTESTANT} for name in ("grpo", "large")]
    _, values = protocol_of(tmp_path, recipes=added, contestants=contestants)
    grpo, large = values["recipes"]["grpo"], values["recipes"]["large"]
    assert large == {**grpo, "allocate": {**grpo["allocate"], "group_size": 32}}


def test_a_setting_within_a_key_keeps_the_rest_of_it(tmp_path: Path) -> None:
    contestants = [{"recipe": name, **CONTESTANT} for name in ("grpo", "pods")]
    protocol, values = protocol_of(tmp_path, contestants=contestants)
    family = ("small", protocol.families["small"])
    settings = {"train.batch.size": 16, "train.learning_rate": 1e-4, "allocate.group_size": 4}
    cell = make_cell(values, family, "pods", 100, 0, "test", settings)
    chosen = cell.params["recipes"]["pods"]
    assert chosen["train"]["batch"] == {**values["recipes"]["pods"]["train"]["batch"], "size": 16}
    assert chosen["train"]["select"] == values["recipes"]["pods"]["train"]["select"]
    assert chosen["allocate"] == {"strategy": "uniform", "group_size": 4}
    plain = make_cell(values, family, "grpo", 100, 0, "test", {"train.batch.size": 16})
    base = values["train"]["batch"]
    assert plain.params["recipes"]["grpo"]["train"]["batch"] == {**base, "size": 16}
    again = make_cell(values, family, "grpo", 100, 1, "test", {"train.batch.size": 16})
    assert again.key != plain.key


def searched(
    protocol: Protocol, values: dict[str, Any], reach: Any
) -> tuple[list[BenchmarkCell], dict[str, Any]]:
    """Return the cells of a whole benchmark in order, and their lines: with the results of `reach`,
    and costs that grow with the budget."""
    results: dict[str, Any] = {}
    seen = []
    while (cell := next(runnable(protocol, values, results), None)) is not None:
        seen.append(cell)
        cost = cell.budget * (0.5 if cell.settings.get("train.batch.size") == 16 else 1.0)
        results[cell.key] = {
            **line_of(cell.recipe, cell.budget, cell.seed, 0.5, cost),
            "key": cell.key,
            "family": cell.family,
            "measures": cell.measures,
            "settings": dict(cell.settings),
            "machine": "a laptop",
            "code": "c0de",
            "seconds": 30.0,
            "device_seconds": {"decode": cost, "prefill": 1.0, "update": cost},
            **reach(cell, len(seen)),
        }
    return seen, results


def test_the_best_half_continues_and_the_best_is_tested(tmp_path: Path) -> None:
    axes = {"learning_rate": [1.0e-4, 3.0e-4, 9.0e-4], "batch.size": [8]}
    protocol, values = protocol_of(tmp_path, search={**PROTOCOL["search"], "axes": axes})
    rng = np.random.default_rng(0)

    def reached(cell: BenchmarkCell, number: int) -> dict[str, Any]:
        # a failure is last, and stops nothing
        return {"failed": "out of memory"} if number == 2 else {"validation": float(rng.random())}

    seen, results = searched(protocol, values, reached)
    assert expected_hours(protocol, results, 1) == 0.0
    grpo_cells = [cell for cell in seen if cell.recipe == "grpo"]
    kinds = [(cell.measures, cell.budget) for cell in grpo_cells]
    assert kinds == [("validation", 100)] * 4 + [("validation", 200)] * 2 + [
        ("test", budget) for budget in (100, 100, 200, 200)
    ]
    first = sorted(grpo_cells[:4], key=lambda c: -results[c.key].get("validation", -1))
    assert [cell.settings for cell in grpo_cells[4:6]] == [cell.settings for cell in first[:2]]
    assert [cell.settings for cell in grpo_cells[6:8]] == [first[0].settings] * 2
    search_lines = [line for line in results.values() if line["measures"] == "validation"]
    text = "\n".join(page(protocol, search_lines, tmp_path / "r.jsonl"))
    assert "| `grpo` | 99 | 100 | 3 |" in text  # one of four failed
    assert "| `grpo` | 99 | 200 | 2 |" in text
    assert "out of memory" in text
    assert {cell.seed for cell in grpo_cells[:6]} == {99}
    assert [cell.seed for cell in grpo_cells[6:]] == [0, 1, 0, 1]


def test_the_choices_of_every_search_and_account_are_tested(tmp_path: Path) -> None:
    search = {**PROTOCOL["search"], "seeds": [98, 99]}
    contestants = [{**PROTOCOL["contestants"][0], "budgets": [100]}]
    protocol, values = protocol_of(tmp_path, search=search, contestants=contestants)

    def reached(cell: BenchmarkCell, number: int) -> dict[str, Any]:
        cheap = cell.settings.get("train.batch.size") == 16
        rate = 0.4 + 0.2 * cheap + 100 * cell.settings.get("train.learning_rate", 0.0)
        rate = rate if cell.settings else 0.7
        return {"validation": rate - 0.1 * (cell.seed == 98), "test": rate}

    seen, results = searched(protocol, values, reached)
    tried = [cell for cell in seen if cell.measures == "validation"]
    assert [cell.seed for cell in tried] == [98] * 4 + [99] * 4
    settings = [dict(cell.settings) for cell in tried]
    assert settings[:4] != settings[4:]
    tested = [dict(cell.settings) for cell in seen if cell.measures == "test"]
    lines = [results[cell.key] for cell in tried]
    best = [max(lines[a : a + 4], key=lambda line: line["validation"]) for a in (0, 4)]
    cheapest = max(
        (line for line in lines if line["flops"]["charged"] == 50.0),
        key=lambda line: line["validation"],
    )
    for line in (*best, cheapest):
        assert tested.count(line["settings"]) == 2  # every seed, once
    assert len(tested) == 2 * len({str(line["settings"]) for line in (*best, cheapest)})


def test_superseded_lines_are_shown_until_new_ones_exist(tmp_path: Path) -> None:
    contestants = [{**each, "budgets": [100]} for each in PROTOCOL["contestants"]]
    protocol, values = protocol_of(tmp_path, contestants=contestants)
    rng = np.random.default_rng(0)

    def reached(cell: BenchmarkCell, number: int) -> dict[str, Any]:
        counts = rng.binomial(8, 0.5, 20)
        found = {"validation": float(rng.random()), "test": float(counts.mean() / 8)}
        return found | {"correct": digits(counts.tolist()), "trials": digits([8] * 20)}

    seen, results = searched(protocol, values, reached)
    file = tmp_path / "r.jsonl"
    supersede_others(protocol, values, file, "There is no line yet.")
    for number, line in enumerate(results.values()):
        append_result(file, {**line, "key": f"of other code {number}"})
    assert due(protocol, values, read_lines(file)) == []  # they are of other code
    supersede_others(protocol, values, file, "The code has changed.")
    lines = read_lines(file)
    assert {line["superseded"] for line in lines} == {"The code has changed."}
    shown = due(protocol, values, lines)
    assert len(shown) == len(seen)
    assert next(runnable(protocol, values, read_results(file))).key == seen[0].key
    write_tables(protocol, values, file)
    text = file.with_suffix(".md").read_text()
    assert "**These results are superseded**, all of them." in text
    assert "- `grpo`, `one_sided`: The code has changed." in text
    # an earlier line of the same cell is not shown beside its replacement
    old = {**lines[0], "validation": 0.999, "key": "an older one"}
    assert due(protocol, values, [old, *lines]) == shown
    # lines that were superseded earlier for another reason are not shown
    before = [{**line, "superseded": "An earlier one.", "budget": 100} for line in lines]
    others = [
        {**line, "settings": each["settings"], "key": f"{line['key']} {number}"}
        for line in before
        for number, each in enumerate(lines)
    ]
    assert due(protocol, values, [*others, *lines]) == shown
    for cell in seen:
        append_result(file, results[cell.key])
        is_done = cell.measures == "test" and cell.recipe == "grpo"
        now = {"superseded" in line for line in due(protocol, values, read_lines(file))}
        assert now == ({False} if is_done or cell.recipe == "one_sided" else {True})
    write_tables(protocol, values, file)
    assert "superseded" not in file.with_suffix(".md").read_text()
    supersede_others(protocol, values, file, "None is of other code.")
    assert len(read_results(file)) == len(seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": ["sgpo"]}, "the reference among them"),
        ({"reference": []}, "the reference among them"),
        ({"seeds": [0, 99]}, "none of them a seed"),
        ({"seeds": [0]}, "seeds needs at least two"),
        ({"seeds": [0, -1]}, "seeds must be at least 0"),
        ({"search": {**PROTOCOL["search"], "seeds": [9, 9]}}, "needs distinct seeds"),
        ({"families": {"small": {"budgets": [200, 100], "changes": {}}}}, "must ascend"),
        (
            {"families": {"big": {"budgets": [9], "changes": {"evaluate": {"num_samples": 36}}}}},
            r"family big has evaluate\.num_samples 36; .* at most 35",
        ),
        ({"families": {"a": {"budgets": [9], "changes": {"profil": {}}}}}, "'profil' is unknown"),
        ({"contestants": [{"recipe": "grop", **CONTESTANT}]}, "recipe 'grop' is unknown"),
        (
            {"contestants": [{"recipe": "grpo", **CONTESTANT, "knob": "allocate.size"}]},
            "recipe grpo has no key allocate.size to tune",
        ),
        (
            {"search": {**PROTOCOL["search"], "axes": {"batch.sise": [8]}}},
            r"has no key train\.batch\.sise to tune",
        ),
    ],
)
def test_an_invalid_protocol_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ParamsError, match=message):
        protocol_of(tmp_path, **changes)


def test_a_plan_is_thinned_only_in_its_last_pass() -> None:
    rows = [
        {
            "visit": 10 * number + place,
            "pass": number,
            "phase": 2 * number + place // 5,
            "order": place % 5,
            "prompt_id": f"p{place}",
            "group_size": 4 if place < 5 else 2,
        }
        for number in range(2)
        for place in range(10)
    ]
    plan = PLAN.frame(rows)
    found = thinned(plan, 44, np.random.default_rng(0))
    assert 42 <= found["group_size"].sum() <= 44
    assert found.filter(pl.col("pass") == 0)["prompt_id"].to_list() == [f"p{k}" for k in range(10)]
    last = found.filter(pl.col("pass") == 1)["prompt_id"].to_list()
    assert last == sorted(last)
    assert 0 < len(last) < 10
    assert found["visit"].to_list() == list(range(len(found)))
    assert found["phase"].is_sorted()
    PLAN.check(found, "the plan")
    assert len(thinned(plan.head(10), 1, np.random.default_rng(0))) == 1
    assert thinned(plan, 60, np.random.default_rng(0)).equals(plan)


@pytest.mark.slow
def test_a_small_benchmark_from_end_to_end(tmp_path: Path) -> None:
    """It runs a trial and a test over a new family; the second time it makes nothing again."""
    base = every_value()
    small = {
        "ingest": {**base["ingest"], "splits": {"train": 24, "validation": 16, "test": 16}},
        "train": {"validation": {"num_samples": 2, "every_share": 1.0}},
        "evaluate": {"num_samples": 2, "pass_at": [1], "num_bootstrap": 20},
    }
    families = {"small": {"budgets": [100, 200], "changes": small}}
    single = {**CONTESTANT, "trials": 1, "budgets": [100]}
    names = ("grpo", "profile_replay")  # the last reads the profile's samples
    contestants = [{"recipe": name, **single} for name in names]
    protocol, values = protocol_of(tmp_path, families=families, contestants=contestants)
    family, work = ("small", protocol.families["small"]), tmp_path / "work"
    changed = make_cell(values, family, "grpo", 100, 0, "test", {}).params
    for _ in range(2):
        prepare_family(work, "small", dict(changed), EMBEDDED)
        marks = sorted(path.stat().st_mtime_ns for path in (work / "families").rglob("*.parquet"))
    file = tmp_path / "protocol.jsonl"
    while cell := next(runnable(protocol, values, read_results(file)), None):
        line = run_cell(cell, work)
        assert "failed" not in line, line
        append_result(file, line)
        assert line["rollouts"] <= 100
        assert line["flops"]["charged"] > 0
        assert line["device_seconds"]["decode"] > 0
        assert (line["rollouts_profile"] > 0) == (cell.recipe != "grpo")
        assert not (work / "cells" / cell.key).exists()
        if cell.measures == "test":
            assert len(line["correct"]) == len(line["trials"]) == 16
    assert marks == sorted(p.stat().st_mtime_ns for p in (work / "families").rglob("*.parquet"))
    write_tables(protocol, values, file)
    page = (tmp_path / "protocol.md").read_text()
    assert page.count("| `profile_replay` |") == 3  # a ratio, a point, a search
    assert page.count("| `profile_replay`, profile shared by 4 runs |") == 1
    assert "protocol-small.svg" in page
    figure = (tmp_path / "protocol-small.svg").read_bytes()
    assert b"profile_replay" in figure
    write_tables(protocol, values, file)
    assert (tmp_path / "protocol-small.svg").read_bytes() == figure
    assert "6 cells, 0 of them failed" in page
    stranger = make_cell(values, family, "grpo", 100, 0, "test", {"train.batch.size": 16})
    append_result(file, {**line, "key": stranger.key})  # of other settings
    assert len(due(protocol, values, read_lines(file))) == 6
    write_json(facts_file(file), {"small": {"pass_rate": 0.123}})
    with pytest.raises(ParamsError, match=r"here, and 12\.30% in .*CPU of another model"):
        runner.prepare(protocol, values, work, file, EMBEDDED)


def test_a_failed_cell_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    protocol, values = protocol_of(tmp_path)
    cell = make_cell(values, ("small", protocol.families["small"]), "grpo", 100, 0, "test", {})

    def fail(*arguments: Any) -> None:
        raise faults.pop()

    faults = [WriteError("the disk is full"), ArtifactError("no prompts here")]
    monkeypatch.setattr(cells, "run_stage", fail)
    with caplog.at_level(logging.WARNING):
        line = run_cell(cell, tmp_path / "work")
    assert line["failed"] == "ArtifactError: no prompts here"
    assert line["key"] == cell.key
    with pytest.raises(WriteError):  # the machine's fault: the next run repeats the cell
        run_cell(cell, tmp_path / "work")


def test_an_interrupted_worker_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool waits for all workers. One that went on would wait for work, and both for ever."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "run_cell", interrupted)
    (cell, *_), context = runnable(*protocol_of(tmp_path), {}), multiprocessing.get_context("fork")
    worker = context.Process(target=run_in_worker, args=(cell, tmp_path))
    worker.start()
    worker.join(PATIENCE)
    assert worker.exitcode == -signal.SIGKILL
