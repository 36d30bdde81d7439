"""The files in the tutorials work under the names on the page."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from tasks.allocate import strategies
from tasks.allocate.planning import load_strategy, make_plan
from tasks.common import params
from tasks.common.recipes import recipe as recipe_of
from tasks.grading import loading, verifiers
from tasks.ingest.candidates import Row
from tasks.ingest.reading import rows
from tasks.train.loading import load_method, load_slots, train_settings
from tasks.train.methods import select
from tests.allocate.test_allocate import profile_of
from tests.docs.pages import ROOT, of, written
from tests.ingest.helpers import sources
from tests.parameters import every_value
from tests.train.steps import plan_of, prompts_of, rollouts_of

VALUES = every_value()


def values(page: str, key: str) -> dict[str, Any]:
    """Return the merged content of a page's `yaml` blocks under `key`."""
    found: dict[str, Any] = {}
    for block in of("yaml"):
        if block.page == page:
            found |= yaml.safe_load(block.text).get(key, {})
    return found


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a tutorial's file a member of its package."""

    def add(package: ModuleType, caption: str) -> None:
        (tmp_path / Path(caption).name).write_text(written(caption))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        importlib.invalidate_caches()

    return add


RECIPES = values("docs/tutorials/method.md", "recipes")


def test_the_strategy(install: Any) -> None:
    install(strategies, "tasks/allocate/strategies/frontier.py")
    profile = profile_of([(solved, 8) for solved in (0, 4, 8, 3, 5, 1)])
    spec = {**RECIPES["frontier"]["allocate"], "num_prompts": 3, "group_size": 4}
    strategy, allocate = load_strategy(spec)
    allocation = allocate(profile, 2, np.random.default_rng(0))
    assert strategy.reads_profile
    assert make_plan(allocation.phases, profile)["group_size"].to_list() == [4] * 6
    chosen = allocation.decisions.filter(pl.col("group_size") > 0)["pass_rate"].to_list()
    assert sorted(chosen) == [0.375, 0.5, 0.625]


def test_the_selector(install: Any) -> None:
    install(select, "tasks/train/methods/select/balanced.py")
    choose = load_method("select", RECIPES["balanced"]["train"]["select"])
    rewards, groups = [1.0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]
    kept = choose(rollouts_of(rewards, groups), np.random.default_rng(0))
    assert np.bincount(np.array(groups)[kept]).tolist() == [2, 4]
    assert np.array(rewards)[kept].sum() == 3
    with pytest.raises(params.ParamsError, match="train.select.max_pairs is 0"):
        load_method("select", {"method": "balanced", "max_pairs": 0})


@pytest.mark.parametrize("name", ["README.md", "docs/tutorials/method.md"])
def test_recipes_are_complete(name: str, install: Any) -> None:
    """Every recipe on the page names methods that exist or are on the page."""
    install(strategies, "tasks/allocate/strategies/frontier.py")
    install(select, "tasks/train/methods/select/balanced.py")
    recipes = values(name, "recipes")
    assert recipes
    for recipe, spec in recipes.items():
        values_of_page = {**VALUES, "recipes": {recipe: spec}}
        load_strategy(recipe_of(values_of_page, recipe)["allocate"])
        load_slots(train_settings(values_of_page, recipe), plan_of([(0, 4)]), prompts_of(1))


def test_the_verifier(install: Any) -> None:
    install(verifiers, "tasks/grading/verifiers/close.py")
    configured = values("docs/tutorials/verifier.md", "verify")["verifiers"]
    verifier = loading.load("within_one_percent", configured)
    outcomes = [verifier.verify(text, "200").outcome for text in ("201", "about 203", "none")]
    assert outcomes == ["correct", "wrong", "unparsed"]
    assert verifier.check("200").outcome == "correct"
    assert verifier.check("many").outcome == "error"


@pytest.mark.sandbox
def test_verifiers_in_the_guide_can_be_loaded() -> None:
    configured = values("docs/guide/verifiers.md", "verify")["verifiers"]
    assert configured
    for name in configured:
        assert callable(loading.load(name, configured).verify)


def test_the_data_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text(written("mine.jsonl"))
    monkeypatch.chdir(tmp_path)
    (source,) = sources(values("docs/tutorials/model-and-data.md", "ingest")["sources"])
    assert [type(row) for row in rows(0, source, None, tmp_path)] == [Row] * 3


@pytest.mark.parametrize("page", ["README.md", "docs/guide/data.md", "docs/tutorials/verifier.md"])
def test_sources_are_complete(page: str) -> None:
    named = values(page, "ingest")["sources"]
    assert len(sources(named)) == len(named) > 0


def test_the_steps_are_in_order() -> None:
    for page, *steps in (
        ("model-and-data", ":caption: mine.jsonl", "winnow init", "budget: null", "winnow run\n"),
        ("verifier", "CONFIGURED", "python -m pytest tests/grading/test_verifiers.py"),
        ("method", "make check", "params --schema >", "tests/bench/measures.py"),
        ("schedule-and-bucket", "winnow run", "dvc push", "git commit", "git pull", "_URL=http"),
        ("decision", "make env", "bin/activate", "winnow doctor"),
    ):
        text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text()
        assert re.search(".*".join(map(re.escape, steps)), text, re.DOTALL), page
