"""Charts in plotly's format: traces and layouts, as plain JSON. `charts.js` draws them.

A chart has one or more variants in one place, and the reader selects one. A trace of a recipe has
the recipe's name as `legendgroup`, by which the page hides it. Colours are names that the page
defines (`@c0`), with a light and a dark shade of each, from a colour-blind-safe set. Plotly
interprets markup in text, so every name is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Trace = dict[str, Any]
Variant = dict[str, Any]
Chart = dict[str, Any]

# line dashes, used when there are more lines than colours
DASHES = ("solid", "dash", "dot", "dashdot")
NUM_COLOURS = 8  # of `page.html`
BAND = 0.16  # opacity
ROW = 26  # pixels per row of horizontal bars


def css(index: int) -> str:
    """Return colour number `index` (modulo NUM_COLOURS) of the page as CSS."""
    return f"var(--c{index % NUM_COLOURS})"


def colour(index: int | None, share: float = 1.0) -> str:
    """Return a page colour for a chart; a share below 1 gives a paler, opaque colour. Without an
    index, return that of the initial policy."""
    return "@initial" if index is None else f"@c{index % NUM_COLOURS}:{share:g}"


def dash(index: int | None) -> str:
    """Return the dash style of line number `index`; it changes every NUM_COLOURS lines."""
    return DASHES[(index or 0) // NUM_COLOURS % len(DASHES)]


def chart(label: str, variants: Mapping[str, Variant]) -> Chart:
    """Return a chart of variants by name; `label` describes it for screen readers."""
    shown = [{"name": name, **variant} for name, variant in variants.items()]
    return {"label": label, "variants": shown}


def variant(
    traces: Sequence[Trace], x_words: str, y_words: str, *, percent: str = "", **layout: Any
) -> Variant:
    """Return traces with the titles of their axes. `percent` names the axes that show shares: `x`,
    `y` or `xy`; `layout` is plotly's, with `xaxis_range` for `range` in `xaxis`."""
    named: dict[str, Any] = {"xaxis_title_text": x_words, "yaxis_title_text": y_words}
    named |= {f"{axis}axis_tickformat": ".0%" for axis in percent}
    return {"data": list(traces), "layout": nested(named | layout)}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys to a nested layout: `xaxis_title_text` is `text` in `title` in `xaxis`."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("_")
        place = found
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return found


def line(
    name: str,
    index: int | None,
    xs: Sequence[float],
    ys: Sequence[Any],
    hover: str,
    *,
    group: str = "",
    **more: Any,
) -> Trace:
    """Return a trace of a curve. The page hides it together with the recipe `group`, if given."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name),
        "legendgroup": group,
        "x": list(xs),
        "y": list(ys),
        "line": {"color": colour(index), "width": 2.4, "dash": dash(index)},
        "hovertemplate": f"%{{fullData.name}}<br>{hover}<extra></extra>",
        **more,
    }


def dots(
    name: str,
    index: int | None,
    xs: Sequence[float],
    ys: Sequence[Any],
    hover: str,
    *,
    group: str = "",
    share: float = 1.0,
) -> Trace:
    """Return a trace of single points; `share` is the strength of their colour."""
    marker = {"color": colour(index, share), "size": 7, "line": {"color": "@paper", "width": 1}}
    trace = line(name, index, xs, ys, hover, group=group)
    return trace | {"mode": "markers", "marker": marker}


def band(
    index: int,
    xs: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    group: str,
) -> Trace:
    """Return a trace of the area between two curves. The page shows bands only if there are few
    recipes."""
    return {
        "type": "scatter",
        "mode": "none",
        "x": [*xs, *reversed(xs)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": f"@c{index % NUM_COLOURS}~{BAND:g}",
        "legendgroup": group,
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"crowded": True},
    }


def bars(
    name: str,
    xs: Sequence[Any],
    ys: Sequence[Any],
    hue: str,
    hover: str,
    *,
    group: str = "",
    **more: Any,
) -> Trace:
    """Return a trace of bars in one colour, outlined in the page's background colour."""
    return {
        "type": "bar",
        "name": escape(name),
        "legendgroup": group,
        "x": list(xs),
        "y": list(ys),
        "marker": {"color": hue, "line": {"color": "@paper", "width": 1}},
        "hovertemplate": f"{hover}<extra></extra>",
        **more,
    }


def rows_layout(names: Sequence[str], per_row: int = 1) -> dict[str, Any]:
    """Return the layout of horizontal bars, `per_row` for each name, with the first name on top."""
    return {
        "yaxis_type": "category",
        "yaxis_categoryorder": "array",
        "yaxis_categoryarray": [escape(name) for name in reversed(names)],
        "yaxis_automargin": True,
        "yaxis_showgrid": False,
        "height": ROW * len(names) * per_row + 90,
    }
