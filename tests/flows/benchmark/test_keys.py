"""A cell's key changes only with the code and the values behind it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.benchmark.protocol import Family, make_cell
from tasks.code.versions import PINS
from tasks.common import code
from tasks.common.params import settings
from tasks.common.recipes import merged
from tasks.train.methods.replay import recent
from tests.files import copy_project
from tests.parameters import every_value

ROOT = Path(__file__).resolve().parents[3]
VALUES = every_value()
RECIPES = ("grpo", "winnow", "pods", "filter_pods", "replay", "vcpo", "value_probe")


def keys(root: Path, values: dict[str, Any] = VALUES) -> dict[str, str]:
    """Return the keys of a cell of each recipe, with the code under `root`."""
    family = ("small", Family([100], {}))
    return {
        recipe: make_cell(values, family, recipe, 100, 0, "test", {}, root).key
        for recipe in RECIPES
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code."""
    return copy_project(tmp_path_factory.mktemp("tree"), "tasks", "flows", *PINS)


@pytest.fixture
def changed(tree: Path) -> Iterator[Any]:
    """Rewrite a file of the copy; return the recipes whose keys changed."""
    before, texts = keys(tree), dict[Path, str]()

    def change(name: str) -> set[str]:
        path = tree / ("" if name.startswith("flows") else "tasks") / name
        texts[path] = path.read_text()
        path.write_text(f"{texts[path]}\nMORE = 1\n")
        clear_caches()
        after = keys(tree)
        return {recipe for recipe in RECIPES if after[recipe] != before[recipe]}

    yield change
    for path, text in texts.items():
        path.write_text(text)
    clear_caches()


def clear_caches() -> None:
    """Clear the caches of a process that runs cells."""
    from flows.benchmark import keys as module

    files = (code.read, code.imports, code.resources, code.uses, code.module_files)
    for function in (*files, module.digests, module.digest_of):
        function.cache_clear()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/methods/pass_rates.py", {"winnow"}),
        ("train/methods/loss/clip.py", {*RECIPES} - {"vcpo"}),
        ("train/methods/select/pods.py", {"pods", "filter_pods"}),
        ("allocate/strategies/band.py", {"filter_pods"}),
        ("allocate/planning.py", {*RECIPES}),
        ("evaluate/evaluation.py", {*RECIPES}),
        ("profile/profile.py", {*RECIPES}),
        ("policy/training.py", {*RECIPES}),
        ("ingest/splits.py", {*RECIPES}),
        ("grading/verifiers/numeric.py", {*RECIPES}),
        ("flows/benchmark/cells.py", {*RECIPES}),
        ("common/accounting/device_time.py", {*RECIPES}),
        ("flows/benchmark/tables.py", set()),
    ],
)
def test_a_key_covers_the_code_that_its_cell_can_run(
    changed: Any, name: str, expected: set[str]
) -> None:
    assert changed(name) == expected


@pytest.mark.parametrize(
    ("change", "is_changed"),
    [
        ({"allocate": {"seed": 7}}, True),
        ({"engine": {"name": "vllm"}}, True),
        ({"engine": {"max_rows": 8}}, True),
        ({"learner": {"max_tokens_per_micro_batch": 64}}, True),
        ({"verify": {"seconds": 1.0}}, True),
        ({"store": {"logprobs": True}}, True),
        ({"train": {"max_staleness": 1}}, True),
        ({"policy": {"tiny": {"training": {"device": "cuda"}}}}, True),
        ({"verify": {"processes": 9}}, False),
        ({"store": {"location": "s3://elsewhere"}}, False),
        ({"allocate": {"passes": 9}}, False),
        ({"report": {"num_bootstrap": 9}}, False),
    ],
)
def test_a_key_covers_the_values_that_change_a_result(
    change: dict[str, Any], is_changed: bool
) -> None:
    before, after = keys(ROOT), keys(ROOT, merged(VALUES, change))
    assert {before[recipe] != after[recipe] for recipe in RECIPES} == {is_changed}


def test_a_key_covers_options_of_vllm_and_the_files_of_a_teacher(tmp_path: Path) -> None:
    teacher = {"kl_coefficient": 0.1, "reference": {"source": str(tmp_path)}}
    recipe = {"recipes": {"grpo": {"train": teacher}}}
    values = merged(VALUES, {"engine": {"name": "vllm"}, **recipe})
    options = merged(values, {"engine": {"vllm": {"quantization": "fp8"}}})
    found = {keys(ROOT, values)["grpo"], keys(ROOT, options)["grpo"]}
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    clear_caches()
    assert len(found | {keys(ROOT, values)["grpo"]}) == 3


def test_a_key_covers_the_defaults_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of the code exclude them."""
    before = keys(ROOT)

    @settings
    class Settings:
        share: float = 0.25  # another default
        capacity: int = 512

    monkeypatch.setattr(recent, "Settings", Settings)
    after = keys(ROOT, every_value())
    assert {recipe for recipe in RECIPES if after[recipe] != before[recipe]} == {"replay", "vcpo"}
