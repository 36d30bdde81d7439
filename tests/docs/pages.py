"""The documentation as data: pages, fenced blocks, and commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("guide/*.md")),
    *sorted((ROOT / "docs").glob("tutorials/*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("**/README.md")),
]
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<kind>[^\n]*)\n(?P<body>.*?)^(?P=fence)$", re.M | re.S)
OPTION = re.compile(r"^:(?P<name>\w+): (?P<value>.*)$", re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LANGUAGES = {"bash", "yaml", "json", "python", "text", ""}


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the file of its `:caption:`, its text."""

    page: str
    language: str
    caption: str | None
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a `bash` block: the variables set before it, and its words."""

    page: str
    variables: dict[str, str]
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


@cache
def blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page; skip directives other than `code-block` (toctree, include)."""
    for found in FENCE.finditer(page.read_text()):
        language, body, caption = found["kind"].strip(), found["body"], None
        if language.startswith("{code-block}"):
            language = language.removeprefix("{code-block}").strip()
            options = {match["name"]: match["value"] for match in OPTION.finditer(body)}
            caption, body = options.get("caption"), OPTION.sub("", body).lstrip("\n")
        elif language.startswith("{"):
            continue
        yield Block(page.relative_to(ROOT).as_posix(), language, caption, body)


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language]


def written(caption: str) -> str:
    """Return the one block with the file `caption`."""
    [found] = [block.text for block in blocks() if block.caption == caption]
    return found


@cache
def commands() -> list[Command]:
    """Return every command of every `bash` block, with joined lines and without comments."""
    found = []
    for block in of("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            variables = {}
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words:
                found.append(Command(block.page, variables, words))
    return found


@cache
def inline() -> list[tuple[str, str]]:
    """Return (page, text) of every piece of inline code."""
    return [
        (page.relative_to(ROOT).as_posix(), found[1])
        for page in PAGES
        for found in CODE.finditer(FENCE.sub("", page.read_text()))
    ]
