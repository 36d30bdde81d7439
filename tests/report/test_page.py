"""The page as data and markup: hostile text, no reference to anything outside, its own scripts
alone."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.artifacts import PROMPTS, ROLLOUTS, Layout
from tasks.common.sealed import read_sealed, write_sealed
from tasks.report.page import data
from tests.report.conftest import make_layout, write_params, write_plans, write_training
from tests.stages import run_stage

HOSTILE = (
    "</script><script>window.hacked = 1</script><!--<img src=x onerror='window.hacked=2'> ${x}"
)
RECIPE = "third"


def hostile_layout(root: Path) -> Layout:
    """A pipeline whose prompts, golds, answers, texts, sources and levels are markup. A recipe can
    have no such name (tests/common/test_params.py)."""
    layout = make_layout(root)
    write_plans(layout, RECIPE, reads_profile=True)
    for seed in (0, 1):
        write_training(layout, RECIPE, seed, scale=1.0, validation=0.5, test=0.5)
    hostile = pl.lit(HOSTILE)
    path = layout.prompts("test")
    texts = dict.fromkeys(("source", "level", "answer"), hostile)
    marked = (hostile + " " + pl.col("prompt")).alias("prompt")
    PROMPTS.write(path, PROMPTS.read(path).with_columns(marked, **texts))
    folders = [layout.evaluation(name, seed) for name in ("sgpo", RECIPE) for seed in (0, 1)]
    for folder in (layout.baseline, *folders):
        rollouts = ROLLOUTS.read(folder / "rollouts.parquet")
        changed = rollouts.with_columns(text=hostile, answer=hostile)
        ROLLOUTS.write(folder / "rollouts.parquet", changed)
        metrics = read_sealed(folder / "metrics.json")
        metrics["levels"][HOSTILE] = metrics["levels"]["2"]
        write_sealed(folder / "metrics.json", metrics)
    return layout


def build(layout: Layout, recipes: list[str]) -> Path:
    """Run the stage; the page."""
    params = write_params(layout.root.parent, recipes, [0, 1])
    done = run_stage("report", params, layout.root)
    assert done.returncode == 0, done.output
    return layout.report / "index.html"


class Elements(HTMLParser):
    """What a page would fetch, its elements in order, and whether they close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.fetched += [f"{tag} {values[name]}" for name in values if name in ("src", "href")]
        self.seen.append(tag)
        assert not [name for name in values if name.startswith("on")], "no handler in an attribute"
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(values["content"])
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(text)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    layout = hostile_layout(tmp_path_factory.mktemp("hostile") / "data")
    return build(layout, ["grpo", "sgpo", RECIPE]).read_text()


def test_the_page_fetches_nothing_and_is_well_formed(hostile: str) -> None:
    elements = Elements()
    elements.feed(hostile)
    assert elements.fetched == []
    assert elements.open == []
    before, _, _ = hostile.partition("<script>")
    assert "url(" not in before
    assert "@import" not in before
    assert "$" not in before.partition('<script type="application/json"')[0]


def test_only_the_pages_own_scripts_may_run(hostile: str) -> None:
    """Plotly's and the page's two, by their digests; the data are no script."""
    elements = Elements()
    elements.feed(hostile)
    assert elements.seen.count("script") == 4
    _data, *scripts = elements.texts["script"]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    expected = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert elements.policy.startswith("default-src 'none';")
    assert elements.policy.endswith(f"script-src {expected}")


def test_hostile_text_is_data(hostile: str) -> None:
    assert "<img" not in hostile.partition("<script>")[0]
    (text,) = re.findall(r'id="data">(.*?)</script>', hostile)
    found: dict[str, Any] = json.loads(text)
    prompt = found["rollouts"]["prompts"][0]
    assert prompt["gold"] == HOSTILE
    assert prompt["policies"]["initial"]["samples"][0]["text"] == HOSTILE
    assert "<" not in text


def test_data_hold_no_tag_and_no_number_that_json_lacks() -> None:
    text = data({"a": [float("nan"), float("inf"), 1.5], "b": "</script>\u2028<!--"})
    assert "<" not in text
    assert json.loads(text) == {"a": [None, None, 1.5], "b": "</script>\u2028<!--"}
