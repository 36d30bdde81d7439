"""The page as data and markup: hostile text, no external references, only its own scripts."""

import base64
import hashlib
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from tasks.common.artifacts import Layout
from tasks.report.curves import Fitted, Monotone
from tasks.report.views.page import HERE, data
from tasks.report.views.plots import draw_arrow, drawn
from tests.report.conftest import HOSTILE


class Elements(HTMLParser):
    """A parser that records fetched URLs, elements and unclosed tags."""

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
def html(hostile: Path) -> str:
    return hostile.read_text()


def test_the_page_fetches_nothing_and_is_well_formed(html: str) -> None:
    elements = Elements()
    elements.feed(html)
    assert elements.fetched == ["script measured.js", "script external.js"]
    assert elements.open == []
    before, _, _ = html.partition("<script>")
    assert "url(" not in before
    assert "@import" not in before
    filled = before.partition('<script type="application/json"')[0]
    assert "$" not in filled.replace(escape(HOSTILE), "")


def test_only_the_pages_own_scripts_may_run(html: str) -> None:
    """The policy has the digests of Plotly's script and the page's two, and a nonce for the files
    beside the page: the digest of the data, which the data cannot contain. They are no script."""
    elements = Elements()
    elements.feed(html)
    assert elements.seen.count("script") == 6
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in elements.texts["script"]
    ]
    nonce, *others = digests
    expected = " ".join([*(f"'sha256-{digest}'" for digest in others), f"'nonce-{nonce}'"])
    for name in ("measured.js", "external.js"):
        assert f'<script src="{name}" nonce="{nonce}"></script>' in html
    assert elements.policy.startswith("default-src 'none';")
    assert elements.policy.endswith(f"script-src {expected}")


def test_hostile_text_is_data(html: str) -> None:
    assert "<img" not in html.partition("<script>")[0]
    (text,) = re.findall(r'id="data">(.*?)</script>', html)
    found: dict[str, Any] = json.loads(text)
    prompt = found["rollouts"]["prompts"][0]
    assert prompt["gold"] == HOSTILE
    assert prompt["policies"]["initial"]["samples"][0]["text"] == HOSTILE
    assert "<" not in text


def test_the_data_have_no_tag_and_no_nonfinite_number() -> None:
    text = data({"a": [float("nan"), float("inf"), 1.5], "b": "</script>\u2028<!--"})
    assert "<" not in text
    assert json.loads(text) == {"a": [None, None, 1.5], "b": "</script>\u2028<!--"}


def test_an_arrow_shows_the_saving_of_the_first_sentence() -> None:
    """The reference ends at 40 % with 8 GFLOPs; sgpo reaches it with 5."""
    curve = Monotone(np.array([0.0, 10e9]), np.array([0.2, 0.6]))
    difference = {"reference": {"low": 0.1, "high": 0.2}}
    points = {"grpo": [{"accuracy": 0.4}], "sgpo": [{"compute_ratio": {"times": 1.6}}]}
    mine = {"validation": {"mean": 0.6}, "flops_charged_mixed": {"mean": 1.0}}
    recipes = {"grpo": {}, "sgpo": {**mine, "differences": difference}}
    results: Any = SimpleNamespace(
        curves=pl.DataFrame({"flops_executed": [8e9]}),
        fits={"sgpo": {"executed": Fitted(curve, [])}},
        summary={"reference": "grpo", "recipes": recipes, "points": points},
    )
    axes = Figure().subplots()
    draw_arrow(axes, results, "executed", "#000000")
    arrow, label = axes.texts
    assert (arrow.xy, arrow.xyann) == (pytest.approx((5.0, 0.4)), pytest.approx((8.0, 0.4)))
    assert label.get_text() == "compute / 1.6"


def test_a_figure_has_at_most_as_many_recipes_as_colours() -> None:
    """It has the reference and the best of the others, in the order of the experiment."""
    cost = {"flops_charged_mixed": {"mean": 1.0}}
    recipes = {f"r{n}": {"validation": {"mean": 0.1 * (n % 6)}, **cost} for n in range(12)}
    results: Any = SimpleNamespace(
        colours={name: n for n, name in enumerate(recipes)},
        summary={"reference": "r0", "recipes": recipes},
    )
    assert drawn(results) == ["r0", "r2", "r3", "r4", "r5", "r9", "r10", "r11"]
    few: Any = SimpleNamespace(
        colours={"r7": 0, "r0": 1}, summary={"reference": "r0", "recipes": recipes}
    )
    assert drawn(few) == ["r7", "r0"]


def test_plots_have_the_pages_colours_and_the_groups_of_the_reference(reported: Layout) -> None:
    """There are 35 steps of 4 groups, of which 18 are never and 14 always solved."""
    names = ("executed", "executed-dark")
    light, dark = ((reported.report / f"plots/{name}.svg").read_text() for name in names)
    page = (HERE / "page.html").read_text().split("prefers-color-scheme")
    for number in (0, 1):
        for picture, style in zip((light, dark), page, strict=True):
            (colour,) = re.findall(rf"--c{number}: (#[0-9a-f]{{6}});", style)
            assert colour in picture
    assert ">test pass@1</text>" in light
    assert "compute /" not in light  # the two do not differ on test
    for words, share in {"all wrong": 13, "mixed": 77, "all right": 10}.items():
        assert re.search(rf">{words}</text>.{{,40}}<text[^>]*>{share}%</text>", light, re.DOTALL)
