"""A small chart kit: lines, stacked bars and dots as inline SVG.

Hand-written because the page must be one file, support light and dark mode, and be readable on a
phone: colours are CSS variables of `page.html` (`--c0` ... , a colour-blind-safe set with a light
and a dark shade each), and text is text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# pixels of a picture, and of its margins
WIDTH = 520
HEIGHT = 330
LEFT = 56
RIGHT = 16
TOP = 14
BOTTOM = 46
# dashes of the lines when there are more lines than colours
DASHES = ("", "7 4", "2 3", "9 3 2 3")
# units of FLOPs, the largest first
PREFIXES = (
    (1e18, "EFLOPs"),
    (1e15, "PFLOPs"),
    (1e12, "TFLOPs"),
    (1e9, "GFLOPs"),
    (1e6, "MFLOPs"),
    (1.0, "FLOPs"),
)
NUM_COLOURS = 8  # of `page.html`


@dataclass(frozen=True)
class Line:
    """A curve with its band. `lead` adds a dotted line up to the first point, for what was spent
    before it; a `strength` below 1 gives a paler colour; the points may be dots, joined, or
    both."""

    name: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = field(default_factory=list)
    high: Sequence[float] = field(default_factory=list)
    lead: bool = False
    strength: float = 1.0
    dots: bool = True
    joined: bool = True


@dataclass(frozen=True)
class Piece:
    """A part of a stacked bar: its height, its label, its style as CSS."""

    value: float
    label: str
    style: str


def unit(largest: float) -> tuple[float, str]:
    """Return the size and the name of the FLOPs unit for numbers up to `largest`."""
    return next((size, name) for size, name in PREFIXES if largest >= size or size == 1.0)


def flops_words(flops: float) -> str:
    """Return FLOPs as text: `1.23 TFLOPs`."""
    size, name = unit(flops)
    return f"{flops / size:.3g} {name}"


def colour(index: int) -> str:
    """Return a colour of the page as CSS."""
    return f"var(--c{index % NUM_COLOURS})"


def pale(index: int, share: float) -> str:
    """Return a colour that is paler the smaller `share` is. It is opaque, so that no grid line
    shows through."""
    return f"color-mix(in srgb, {colour(index)} {share:.0%}, var(--paper))"


def tint(index: int, share: float) -> str:
    """Return the style of an area filled with a pale colour."""
    return f"fill:{pale(index, share)}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    step = nice_step((high - low) / count) if high > low else 1.0
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def nice_step(raw: float) -> float:
    """Return the smallest round number of at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(
        factor * power for factor in (1, 2, 2.5, 5, 10) if raw <= factor * power * (1 + 1e-9)
    )


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def text(x: float, y: float, words: str, css: str = "", anchor: str = "middle") -> str:
    """Return a text element."""
    return f'<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(body: Sequence[str], label: str, height: float = HEIGHT) -> str:
    """Return the parts as one picture that scales with the page; `label` is for screen readers."""
    attributes = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{"".join(body)}</svg>'


def axes(
    x: Scale,
    y: Scale,
    x_words: str,
    y_words: str,
    *,
    x_ticks: Sequence[float],
    percent: bool = True,
) -> list[str]:
    """Return grid, tick labels and axis titles."""
    parts = []
    for value in ticks(y.low, y.high):
        label = f"{value:.0%}" if percent else f"{value:g}"
        parts.append(
            f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(value)}" y2="{y(value)}"/>'
        )
        parts.append(text(x.start - 7, y(value) + 4, label, "tick", "end"))
    parts += [text(x(value), y.start + 17, f"{value:g}", "tick") for value in x_ticks]
    parts.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>')
    parts.append(text((x.start + x.end) / 2, y.start + 36, x_words, "name"))
    middle = (y.start + y.end) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle})">{text(14, middle, y_words, "name")}</g>')
    return parts


def line_chart(
    lines: Sequence[Line], x_words: str, y_words: str, label: str, *, percent: bool = True
) -> str:
    """Return curves over a common x axis that starts at 0; the y axis spans all values, bands
    included."""
    ys = [value for line in lines for values in (line.ys, line.low, line.high) for value in values]
    low, high = padded(min(ys), max(ys), ceiling=1.0 if percent else math.inf)
    x = Scale(0.0, max(max(line.xs) for line in lines) or 1.0, LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = axes(x, y, x_words, y_words, x_ticks=ticks(x.low, x.high), percent=percent)
    for line in lines:
        parts += curve(line, x, y, percent)
    return svg(parts, label)


def calibration_chart(
    lines: Sequence[Line], expected: Line, x_words: str, y_words: str, label: str
) -> str:
    """Return observed against predicted rates, both from 0 to 1: the diagonal dotted, `expected`
    dashed, the curves on top."""
    x = Scale(0.0, 1.0, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts = axes(x, y, x_words, y_words, x_ticks=ticks(0, 1), percent=False)
    parts.append(f'<line class="diagonal" x1="{x(0)}" x2="{x(1)}" y1="{y(0)}" y2="{y(1)}"/>')
    path = " ".join(f"{x(a)},{y(b)}" for a, b in zip(expected.xs, expected.ys, strict=True))
    parts.append(f'<polyline points="{path}" class="expected"/>')
    for line in lines:
        parts += curve(line, x, y, percent=False)
    return svg(parts, label)


def padded(low: float, high: float, ceiling: float) -> tuple[float, float]:
    """Return the range with a little room above and below, within 0 and `ceiling`."""
    room = max((high - low) * 0.06, 0.01)
    return max(low - room, 0.0), min(high + room, ceiling)


def curve(line: Line, x: Scale, y: Scale, percent: bool) -> list[str]:
    """Return one curve: band, lead, line, and a dot with its numbers at every point."""
    hue = pale(line.colour, line.strength)
    dash = DASHES[line.colour // NUM_COLOURS % len(DASHES)]
    points = [(x(a), y(b)) for a, b in zip(line.xs, line.ys, strict=True)]
    parts: list[str] = []
    if line.low:
        upper = [f"{x(a)},{y(b)}" for a, b in zip(line.xs, line.high, strict=True)]
        lower = [f"{x(a)},{y(b)}" for a, b in zip(line.xs, line.low, strict=True)]
        parts.append(
            f'<polygon points="{" ".join([*upper, *reversed(lower)])}" style="fill:{hue}" '
            'class="band"/>'
        )
    if line.lead and points[0][0] > x.start:
        where = f'x1="{x.start}" x2="{points[0][0]}" y1="{points[0][1]}" y2="{points[0][1]}"'
        parts.append(
            f'<line {where} class="lead" style="stroke:{hue}">'
            f"<title>{escape(line.name)}: profiling</title></line>"
        )
    if line.joined:
        path = " ".join(f"{a},{b}" for a, b in points)
        style = f'class="curve" stroke-dasharray="{dash}" style="stroke:{hue}"'
        parts.append(f'<polyline points="{path}" {style}/>')
    if not line.dots:
        return parts
    for (a, b), across, up in zip(points, line.xs, line.ys, strict=True):
        number = f"{up:.1%}" if percent else f"{up:.3g}"
        words = f"{line.name}: {number} at {across:.3g}"
        dot = f'<circle cx="{a}" cy="{b}" r="3" style="fill:{hue}">'
        parts.append(f"{dot}<title>{escape(words)}</title></circle>")
    return parts


def bar_chart(
    bars: Sequence[tuple[str, Sequence[Piece]]], x_words: str, y_words: str, label: str
) -> str:
    """Return stacked vertical bars with a name under each."""
    tallest = max(sum(piece.value for piece in pieces) for _, pieces in bars) or 1.0
    y = Scale(0.0, tallest * 1.08, HEIGHT - BOTTOM, TOP)
    x = Scale(0.0, float(len(bars)), LEFT, WIDTH - RIGHT)
    parts = axes(x, y, x_words, y_words, x_ticks=[], percent=False)
    width = round((x(1) - x(0)) * 0.78, 1)
    for index, (name, pieces) in enumerate(bars):
        base = 0.0
        for piece in [piece for piece in pieces if piece.value]:
            top = y(base + piece.value)
            height = round(y(base) - top, 1)
            where = f'x="{x(index + 0.11)}" y="{top}" width="{width}" height="{height}"'
            title = escape(f"{name}: {piece.label}, {piece.value:g}")
            parts.append(
                f'<rect {where} style="{piece.style}" class="piece"><title>{title}</title></rect>'
            )
            base += piece.value
        parts.append(text(x(index + 0.5), y.start + 17, name, "tick"))
    return svg(parts, label)


def stack_chart(rows: Sequence[tuple[str, Sequence[Piece]]], x_words: str, label: str) -> str:
    """Return stacked horizontal bars with a name above each."""
    longest = max(sum(piece.value for piece in pieces) for _, pieces in rows) or 1.0
    x = Scale(0.0, longest, 12, WIDTH - RIGHT)
    height = 52 * len(rows) + 52
    bottom = 52 * len(rows) + 6
    parts = [
        f'<line class="grid" x1="{x(v)}" x2="{x(v)}" y1="4" y2="{bottom}"/>'
        for v in ticks(0, longest)
    ]
    parts += [text(x(value), bottom + 16, f"{value:g}", "tick") for value in ticks(0, longest)]
    for index, (name, pieces) in enumerate(rows):
        top = 52 * index + 4
        base = 0.0
        parts.append(text(14, top + 14, name, "label", "start"))
        for piece in [piece for piece in pieces if piece.value]:
            left = x(base)
            right = x(base + piece.value)
            where = f'x="{left}" y="{top + 20}" width="{round(right - left, 1)}" height="24"'
            title = escape(f"{name}: {piece.label} {piece.value:.3g}")
            parts.append(
                f'<rect {where} style="{piece.style}" class="piece"><title>{title}</title></rect>'
            )
            base += piece.value
    parts.append(text((12 + WIDTH - RIGHT) / 2, bottom + 36, x_words, "name"))
    return svg(parts, label, height)


def dot_chart(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], x_words: str, label: str
) -> str:
    """Return a row of dots (name, share from 0 to 1, CSS colour) for each of `rows`. The dots are
    one below the other, so that equal ones are visible."""
    x = Scale(0.0, 1.0, 110, WIDTH - RIGHT - 8)
    tall = 11 * max(len(dots) for _, dots in rows) + 14
    height = tall * len(rows) + 54
    bottom = tall * len(rows) + 8
    parts = [
        f'<line class="grid" x1="{x(v)}" x2="{x(v)}" y1="4" y2="{bottom}"/>' for v in ticks(0, 1)
    ]
    parts += [text(x(value), bottom + 16, f"{value:.0%}", "tick") for value in ticks(0, 1)]
    for index, (name, dots) in enumerate(rows):
        top = tall * index + 14
        short = name if len(name) < 15 else f"{name[:13]}…"
        parts.append(text(100, top + tall / 2 - 5, short, "tick", "end"))
        for place, (what, share, hue) in enumerate(dots):
            title = escape(f"{name}, {what}: {share:.1%}")
            y = top + 11 * place
            parts.append(
                f'<line class="span" x1="{x(0)}" x2="{x(share)}" y1="{y}" y2="{y}" '
                f'style="stroke:{hue}"/>'
            )
            where = f'cx="{x(share)}" cy="{y}" r="5" class="dot"'
            parts.append(f'<circle {where} style="fill:{hue}"><title>{title}</title></circle>')
    parts.append(text((x.start + x.end) / 2, bottom + 36, x_words, "name"))
    return svg(parts, label, height)
