"""The page in a headless Chromium: no errors, no requests, dark and light, a phone, the keyboard,
the choices, and hostile text."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.common.artifacts import Layout
from tasks.common.params import Budget
from tasks.report.external import write_external
from tasks.report.run import NO_ROLLOUTS
from tasks.report.views.page import page
from tests.report.browser import Browser
from tests.report.conftest import HOSTILE, RECIPE, results
from tests.report.test_external import OUTCOMES, write_import

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

TRACES = (
    "[...document.querySelectorAll('[data-chart={}] .plot')].flatMap(p => p.data.map(t => t.name))"
)
ROWS = "#prompts > tr"
UNFOLD = "document.querySelectorAll('details').forEach(part => (part.open = true))"


@pytest.fixture(scope="module")
def pages(reported: Layout, hostile: Path) -> dict[str, Path]:
    return {"plain": reported.report / "index.html", "hostile": hostile}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(running: Browser) -> Browser:
    running.problems.clear()
    running.requests.clear()
    running.resize(1200, 900)
    running.scheme("light")
    return running


def texts(browser: Browser, selector: str) -> list[str]:
    found = f"[...document.querySelectorAll({selector!r})].map(one => one.textContent)"
    return list(browser.run(found))


def put(browser: Browser, selector: str, value: str) -> None:
    """Fill in a field as a reader does; choose an entry of a list by its text."""
    browser.run(
        f"""(() => {{
          const field = document.querySelector({selector!r});
          const same = [...field.options ?? []].find(option => option.text === {value!r});
          field.value = same ? same.value : {value!r};
          for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind));
        }})()"""
    )
    browser.settle()


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_the_page_opens_without_an_error_or_a_request(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name])
    assert browser.problems == []
    requests = [url for url in browser.requests if not url.startswith(("data:", "blob:"))]
    files = [pages[name], *map(pages[name].with_name, ("measured.js", "external.js"))]
    assert requests == [file.as_uri() for file in files]
    assert browser.run("document.getElementById('other-trainers').hidden")
    assert browser.run("document.querySelectorAll('.plot:has(svg)').length") == 3
    browser.run(UNFOLD)
    browser.settle()
    assert browser.run("document.querySelectorAll('[data-chart]').length") == 8
    assert browser.run("document.querySelectorAll('.plot:has(svg)').length") == 8
    assert browser.run("document.querySelectorAll('.key-of:has(span)').length") == 8
    assert browser.problems == []


def test_errors_of_a_page_are_recorded(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(
        "<script>console.error('one'); setTimeout(() => { throw Error('two') })</script>"
    )
    browser.open(page)
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert len(browser.problems) == 2


def test_hostile_text_is_shown_and_not_run(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    browser.run(UNFOLD)
    browser.settle()
    browser.run("document.querySelector('#prompts button').click()")
    assert browser.run("document.querySelector('#prompts .card pre').textContent") == HOSTILE
    assert browser.run("window.hacked ?? null") is None
    assert browser.run("document.querySelectorAll('img, .rollouts script').length") == 0
    ticks = texts(browser, "[data-chart=levels] .ytick")
    assert any("<script>" in tick for tick in ticks), "plotly shows it as text"
    assert RECIPE in texts(browser, "[data-chart=tested] .ytick")
    # the page's policy would stop an injected script
    script = "Object.assign(document.createElement('script'), {text: 'window.hacked = 3'})"
    browser.run(f"document.body.append({script})")
    assert browser.run("window.hacked ?? null") is None


def test_a_recipe_is_hidden_by_its_button_and_by_the_keyboard(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["plain"])
    browser.run(UNFOLD)
    browser.settle()
    traces = TRACES.format("accuracy")
    assert {"grpo", "sgpo", "grpo/0", "sgpo/1"} <= set(browser.run(traces))
    browser.run("document.querySelector('[data-recipe=grpo]').click()")
    assert not [name for name in browser.run(traces) if name and name.startswith("grpo")]
    assert "sgpo" in browser.run(traces)
    assert set(browser.run(TRACES.format("steps"))) == {"sgpo/0", "sgpo/1"}
    browser.run("document.querySelector('[data-recipe=grpo]').focus()")
    browser.press("Enter", "\r")
    assert "grpo" in browser.run(traces)
    assert browser.run("document.querySelector('[data-recipe=grpo]').ariaPressed") == "true"


def test_the_advice_follows_the_budget(browser: Browser, pages: dict[str, Path]) -> None:
    """grpo trains while sgpo still profiles (100 GFLOPs); later sgpo is better."""
    browser.open(pages["plain"])
    for place, words in (
        ("2", "45 GFLOPs charged, take grpo"),
        ("20", "450 GFLOPs charged, take sgpo"),
    ):
        put(browser, "#budget", place)
        (advice,) = texts(browser, "#advice")
        assert advice.startswith(f"With {words}: ")
    put(browser, "[data-chart=budget] select", "rollouts")
    assert texts(browser, "#advice")[0].startswith("With 300 rollouts, take ")
    assert texts(browser, "[data-chart=budget] .xtitle") == ["rollouts"]


def test_rollouts_are_found_by_text_and_change(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"])
    assert len(texts(browser, ROWS)) == 25
    assert texts(browser, "#found") == ["200 of 200 prompts"]
    browser.run("document.getElementById('more').click()")
    assert len(texts(browser, ROWS)) == 50
    browser.press("/")
    assert browser.run("document.activeElement.id") == "search"
    browser.write("question 101:")
    assert [row[:13] for row in texts(browser, ROWS)] == ["Question 101:"]
    browser.run("document.querySelector('#prompts button').focus()")
    browser.press("Enter", "\r")
    (opened,) = texts(browser, "#prompts .opened")
    assert "gold answer: 7" in opened
    assert "after, sgpo/1" in opened
    put(browser, "#search", "nothing says this")
    assert texts(browser, ROWS) == []
    put(browser, "#search", "")
    put(browser, "#change", "worse")
    rows = texts(browser, ROWS)
    assert rows
    assert all(row.endswith("worse") for row in rows)


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, pages: dict[str, Path]) -> None:
    browser.resize(390, 844, touch=True)
    for path in pages.values():
        browser.open(path)
        browser.run(UNFOLD)
        browser.settle()
        browser.run("document.querySelector('#prompts button').click()")
        browser.settle()
        assert browser.run("document.documentElement.scrollWidth") == 390
        charts = (
            "[...document.querySelectorAll('.plot svg')].map(s => s.getBoundingClientRect().right)"
        )
        assert max(browser.run(charts)) <= 390
        bottom = "one => one.getBoundingClientRect().bottom"
        buttons = browser.run(f"[...document.querySelectorAll('.recipes button')].map({bottom})")
        assert max(buttons) <= browser.run(f"({bottom})(document.querySelector('.recipes'))")


def test_the_page_is_short_and_its_tables_show_that_they_scroll(
    browser: Browser, pages: dict[str, Path]
) -> None:
    height = "document.documentElement.scrollHeight"
    browser.resize(1280, 900)
    browser.open(pages["plain"])
    assert browser.run(height) <= 4000
    browser.resize(390, 844, touch=True)
    browser.settle()
    table = "document.querySelector('.scroll')"
    assert browser.run(f"{table}.scrollWidth > {table}.clientWidth")
    assert browser.run(f"getComputedStyle({table}).backgroundAttachment") == (
        "local, local, scroll, scroll"  # shades at the edges, and covers that scroll with the table
    )


def test_the_page_starts_on_the_account_of_the_budget(
    browser: Browser, finished: Layout, tmp_path: Path
) -> None:
    """Its slider is at all that was spent: 600 GFLOPs."""
    path = tmp_path / "index.html"
    path.write_text(page(results(finished, budget=Budget("executed", 6e11)), NO_ROLLOUTS))
    browser.open(path)
    assert texts(browser, "select option:checked")[:1] == ["executed"]
    assert texts(browser, "[data-chart=budget] option:checked") == ["executed"]
    assert texts(browser, "#advice")[0].startswith("With 600 GFLOPs executed, take ")


def test_seconds_are_of_the_weights_of_the_page(
    browser: Browser, copied: Layout, pages: dict[str, Path]
) -> None:
    """grpo has 62 s for 9,000 tokens; sgpo/1 has other weights on the second page."""
    cells = "[...document.querySelectorAll('main table')[0].rows].map(r => [...r.cells].slice(-2))"
    words = f"{cells}.map(row => row.map(cell => cell.textContent).join(' '))"
    browser.open(pages["plain"])
    ours = ["seconds tokens/s", "28 286", "62 145", "28 286", "62 145", "– –"]
    assert browser.run(words) == ours
    script = copied.report / "measured.js"
    script.write_text(script.read_text().replace("sgpo/1 sgpo-1", "sgpo/1 other"))
    browser.open(copied.report / "index.html")
    assert browser.run(words) == [ours[0], "– –", *ours[2:]]


def test_imports_are_shown_without_sideways_scrolling(browser: Browser, copied: Layout) -> None:
    write_import(copied, "a<b>", OUTCOMES)
    write_external(copied, 50)
    for width, scheme in ((1280, "light"), (390, "dark")):
        browser.resize(width, 844)
        browser.scheme(scheme)
        browser.open(copied.report / "index.html")
        assert texts(browser, "#other-trainers h2") == ["Other trainers"]
        assert texts(browser, "#other-trainers td")[:3] == ["external/a<b>", "verl", "9"]
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_the_key_of_a_chart_has_its_colours(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"])
    browser.run(UNFOLD)
    browser.settle()
    assert texts(browser, "[data-chart=accuracy] .key-of span") == ["grpo", "sgpo"]
    assert texts(browser, "[data-chart=tested] .key-of span") == ["sgpo", "grpo", "initial"]
    assert texts(browser, "[data-chart=transitions] .key-of span") == ["grpo"]
    shown = "getComputedStyle(document.querySelector('[data-chart=accuracy] .key-of i'))"
    assert browser.run(f"{shown}.backgroundColor") == "rgb(0, 114, 178)"


def test_the_first_screen_has_sentence_curve_and_table(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """They do not overlap when the window changes its size."""
    browser.resize(1280, 900)
    browser.open(pages["plain"])
    bottoms = "['.lead', '.plot', 'main table'].map(s => bottom(document.querySelector(s)))"
    bottom = "const bottom = one => one.getBoundingClientRect().bottom"
    for width in (1280, 1000):
        browser.resize(width, 900)
        browser.settle()
        lead, plot, table = browser.run(f"(() => {{ {bottom}; return {bottoms}; }})()")
        assert lead + 300 < plot < table - 100 < 800


def test_the_dark_page_has_dark_charts(browser: Browser, pages: dict[str, Path]) -> None:
    ink = "document.querySelector('[data-chart=accuracy] .plot')._fullLayout.font.color"
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(pages["plain"])
    light = (browser.run(ink), browser.run(paper))
    browser.scheme("dark")
    browser.settle()
    dark = (browser.run(ink), browser.run(paper))
    assert light == ("rgb(28,33,38)", "rgb(255, 255, 255)")
    assert dark == ("rgb(230,233,236)", "rgb(21, 25, 29)")
    assert browser.problems == []
