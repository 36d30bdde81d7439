"""The effect of edits: the digests of every cell before and after."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.code import versions
from tasks.code.__main__ import write
from tasks.code.cells import cells
from tasks.code.effective import complete
from tasks.code.left_out import FILES, is_left_out
from tasks.code.verifiers import verifiers_in_use
from tasks.common import code, params
from tasks.common.code import ROOT
from tests.files import copy_project

WRITTEN = params.load(ROOT / "params.yaml")
LIBRARIES = {
    "aiohttp": "moves bytes",
    "botocore": "moves bytes",
    "fsspec": "moves bytes",
    "httpx": "moves bytes",
    "httpx2": "moves bytes",
    "huggingface_hub": "fetches what a commit hash names",
    "matplotlib": "draws the report's plots",
    "mlflow": "the record",
    "openai": "moves bytes",
    "plotly": "draws the report's page",
    "psutil": "processes",
    "pyarrow": "a file format",
    "ray": "starts processes on other machines",
    "safetensors": "a file format",
    "tabulate": "the table of counts in the log of ingest",
    "tqdm": "the progress bar",
    "yaml": "a file format",
}
"""A module that some stage imports, and the reason why its version does not matter."""
VALUES = complete(WRITTEN)
RECIPES = {"grpo", "sgpo", "pods", "filter_pods", "pods_random", "profile_replay"}
ALL = complete({**WRITTEN, "experiment": {"recipes": sorted(RECIPES), "seeds": [0]}})


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return digests(ALL, ROOT)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy_project(tmp_path, "tasks", *versions.PINS)


def digests(values: dict[str, Any], root: Path) -> dict[str, Any]:
    return {name: cell.digests(root) for name, cell in cells(values, root).items()}


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def stale(before: dict[str, Any], root: Path, values: dict[str, Any] = ALL) -> set[str]:
    after = digests(values, root)
    assert after.keys() == before.keys()
    return {name for name in after if after[name] != before[name]}


def of(stage: str, recipes: set[str]) -> set[str]:
    return {f"{recipe}/{stage}" for recipe in recipes}


READERS = {"profile_replay"}


def selecting(method: str) -> set[str]:
    """Return the recipes whose training selects by `method`."""
    trains = {name: ALL["recipes"][name]["train"] for name in RECIPES}
    return {n for n, train in trains.items() if train.get("select", {}).get("method") == method}


def test_comments_new_methods_and_unused_files_change_no_digest(
    before: dict[str, Any], root: Path
) -> None:
    for path in (root / "tasks").rglob("*.py"):
        append(path, "\n# a comment\n")
    for registry in (
        "train/methods/select",
        "allocate/strategies",
        "grading/verifiers",
        "ingest/sources",
        "policy/families",
        "engines",
        "store/admin",
    ):
        (root / "tasks" / registry / "new.py").write_text("def select(): pass\n")
    for name in (
        "grading/verifiers/countdown.py",
        "policy/source.py",  # not used for the tiny policy
        "policy/converted.py",
        "ingest/sources/gsm8k.py",
        "store/compaction.py",
        "common/tracking/models.py",
        "engines/server/engine.py",
    ):
        append(root / "tasks" / name, "\nMORE = 1\n")
    assert stale(before, root) == set()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/methods/select/pods.py", of("train", selecting("pods"))),
        ("train/methods/loss/clip.py", of("train", RECIPES)),
        ("allocate/strategies/band.py", {"filter_pods/allocate"}),
        # allocate searches for the line `reads_profile = True`
        ("train/methods/replay/profile.py", of("train", READERS) | of("allocate", READERS)),
        ("report/views/page.py", {"report"}),
        ("report/views/page.html", {"report"}),  # not Python, so it counts for its readers
        (
            "grading/verifiers/numeric.py",  # in use, so it changes the stages that grade
            {"ingest", "profile", "baseline"} | of("train", RECIPES) | of("evaluate", RECIPES),
        ),
        ("policy/training.py", {"policy"}),
        ("policy/families/chain_sum.py", {"policy"}),
        ("ingest/sources/reasoning_gym.py", {"ingest"}),
    ],
)
def test_an_edit_changes_the_cells_that_can_run_it(
    before: dict[str, Any], root: Path, name: str, expected: set[str]
) -> None:
    append(root / "tasks" / name, "\nMORE = 1\n")
    assert stale(before, root) == expected


def test_a_new_version_of_a_library_changes_its_users_but_no_policy(
    before: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str | None:
        return "2.14.0" if name == "torch" else code.installed_version(name)

    monkeypatch.setattr(versions, "installed_version", installed)
    stages = of("train", RECIPES) | of("evaluate", RECIPES)
    # readers of the profile's samples use the store, which imports the engines
    assert stale(before, root) == {"profile", "baseline"} | stages | of("allocate", READERS)


def test_a_library_that_is_not_installed_counts_with_its_pin(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda name: None)
    versions.pins.cache_clear()
    assert versions.versions(["vllm"], root) == {"vllm": "0.32.0"}


def test_no_name_leads_out_of_a_registry(root: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("import os")
    (root / "tasks/allocate/evil.py").write_text("import os")
    recipes = {**VALUES["recipes"]}
    for name in (f"..{tmp_path}/evil", "/../evil", "..evil"):
        recipes["sgpo"] = {**VALUES["recipes"]["sgpo"], "allocate": {"strategy": name}}
        files = digests({**ALL, "recipes": recipes}, root)["sgpo/allocate"]["files"]
        assert not [path for path in files if "evil" in path]


def test_only_the_named_engine_counts(root: Path) -> None:
    named = {**ALL, "engine": {**VALUES["engine"], "name": "server"}}
    files = digests(named, root)["profile"]["files"]
    assert "tasks/engines/server/engine.py" in files
    assert "tasks/engines/vllm.py" not in files
    both = digests(ALL, root)["profile"]["files"]
    assert {"tasks/engines/hf/engine.py", "tasks/engines/vllm.py"} <= set(both)


BY_COLUMN = {
    "column": "data_source",
    "values": {"openai/gsm8k": "numeric", "lighteval/MATH": "math"},
    "otherwise": "reject",
}


def entry(preset: str, **more: Any) -> dict[str, Any]:
    sources = [{"preset": preset, "settings": {}, **more}]
    return {"ingest": {"sources": sources}, "verify": {"verifiers": {}}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (entry("gsm8k"), ["numeric"]),
        (entry("gsm8k", verifier="exact"), ["exact"]),
        (entry("mapping", settings={"verifier": "choice"}), ["choice"]),
        (entry("verl", verifier=BY_COLUMN), ["math", "numeric"]),
        (entry("mapping", settings={"verifier": BY_COLUMN}), ["math", "numeric"]),
        (
            entry("gsm8k", verifier="mine")
            | {
                "verify": {
                    "verifiers": {
                        "mine": {"method": "composite", "weights": {"inner": 0.5, "exact": 0.5}},
                        "inner": {"method": "part", "verifier": "numeric", "pattern": "a"},
                        "unused": {"method": "format", "tags": ["a"]},
                    }
                }
            },
            ["composite", "exact", "numeric", "part"],
        ),
    ],
)
def test_the_verifiers_in_use_are_those_of_the_sources(
    values: dict[str, Any], expected: list[str]
) -> None:
    assert verifiers_in_use(values, ROOT) == expected


def test_all_verifiers_count_for_a_source_that_names_none(root: Path) -> None:
    (root / "tasks/ingest/sources/silent.py").write_text("def read(settings): yield from ()\n")
    found = verifiers_in_use(entry("silent"), root)
    assert {"composite", "countdown", "math", "numeric"} <= set(found)


def test_every_library_of_a_stage_is_classified() -> None:
    """Its version changes values, or does not."""
    modules = {module for cell in cells(ALL, ROOT).values() for module in cell.modules}
    classified = {*versions.PACKAGES, *LIBRARIES, *sys.stdlib_module_names, "tasks"}
    files = [
        path
        for path in code.reach(modules, ROOT)
        if not is_left_out(path.relative_to(ROOT).as_posix())
    ]
    assert code.libraries(files, ROOT) - classified == set()


def test_excluded_files_exist() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tasks").rglob("*.py")]
    assert [start for start in FILES if not any(name.startswith(start) for name in names)] == []


def test_exactly_the_files_of_the_cells_are_written(tmp_path: Path) -> None:
    removed = tmp_path / "sgpo/train.json"
    removed.parent.mkdir(parents=True)
    removed.write_text("{}")
    experiment = {"recipes": ["grpo", "pods"], "seeds": [0]}
    write({**WRITTEN, "experiment": experiment}, ROOT, tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    stages = {"ingest", "policy", "profile", "baseline", "report"}
    recipes = {f"{r}/{s}" for r in ("grpo", "pods") for s in ("allocate", "train", "evaluate")}
    kinds = ("json", "params.yaml")
    files = {f"{name}.{kind}" for name in stages | recipes for kind in kinds}
    assert written == {"params.yaml", *files}
