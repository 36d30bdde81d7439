"""The plots that `dvc plots` shows side by side: validation accuracy over each account of compute,
as SVG files that need nothing else, neither the page's styles nor a script from a network."""

from pathlib import Path

import polars as pl

from tasks.report.charts import HEIGHT, WIDTH, colour, text
from tasks.report.evidence import Evidence
from tasks.report.figures import accuracy_over, colours
from tasks.report.leaderboard import COMPARED, Fits

PER_LINE = 4  # recipes in a line of the legend
LINE_HEIGHT = 20


def plots(evidence: Evidence, curves: pl.DataFrame, fits: Fits) -> dict[str, str]:
    """Return the figure of each account by the account's name."""
    return {
        account: standalone(accuracy_over(evidence, curves, fits, account), colours(evidence))
        for account in COMPARED
    }


def standalone(picture: str, names: dict[str, int]) -> str:
    """Return a figure of the page as a picture of its own: with the page's styles, a background,
    and the names of its colours below."""
    height = HEIGHT + LINE_HEIGHT * -(-len(names) // PER_LINE) + 8
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    placed = picture.replace("<svg ", f'<svg width="{WIDTH}" height="{HEIGHT}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{page_styles()}</style>'
        f'<rect width="100%" height="100%" style="fill:var(--paper)"/>{placed}{legend(names)}'
        "</svg>\n"
    )


def legend(names: dict[str, int]) -> str:
    """Return a square of each colour with its name, PER_LINE in a line."""
    parts = []
    for place, (name, index) in enumerate(names.items()):
        x = 20 + place % PER_LINE * (WIDTH - 20) / PER_LINE
        y = HEIGHT + LINE_HEIGHT * (place // PER_LINE)
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" style="fill:{colour(index)}"/>')
        parts.append(text(x + 16, y + 10, name, "label", "start"))
    return "".join(parts)


def page_styles() -> str:
    """Return the light colours of `page.html` and its styles of what is in a figure."""
    lines = (Path(__file__).parent / "page.html").read_text().splitlines()
    first = lines.index(":root {")
    root = lines[first : lines.index("}", first) + 1]
    inside = [line for line in lines if line.startswith(("svg .", "svg text"))]
    return "\n".join([*root, "svg { font-family: sans-serif; }", *inside])
